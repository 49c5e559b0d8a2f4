package logs_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/logs"
	"github.com/rara-run/rara/executors/go/internal/redact"
)

func TestNoLineHoldsASecret(t *testing.T) {
	t.Parallel()
	const secret = "hunter2-hunter2"
	var redactor redact.Redactor
	redactor.Add(secret)
	var out strings.Builder
	logger := logs.Redacted(logs.New(&out, "json", "debug"), &redactor)
	logger.With("with", secret).WithGroup("in").Warn("said "+secret,
		"text", secret, "error", errors.New(secret), "group", slog.GroupValue(slog.String("a", secret)),
		"values", map[string]string{"k": secret}, "number", 7)
	line := out.String()
	if strings.Contains(line, secret) || strings.Count(line, redact.Mark) != 6 {
		t.Errorf("got %s", line)
	}
	for _, part := range []string{`"event":"said ***"`, `"level":"warning"`, `"timestamp":`, `"number":7`} {
		if !strings.Contains(line, part) {
			t.Errorf("%s is not in %s", part, line)
		}
	}
}
