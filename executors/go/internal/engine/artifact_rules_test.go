package engine

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

// The names are those that the scheduler and the Python SDK are tried with.
func TestNamesThatTheSchedulerWouldRefuseAreRefusedAtOnce(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../../../tests/support/artifact_names.json")
	if err != nil {
		t.Fatal(err)
	}
	var names struct{ Good, Bad []string }
	if err := json.Unmarshal(data, &names); err != nil {
		t.Fatal(err)
	}
	for _, name := range names.Good {
		if err := checkOutput(Output{Name: name, Type: "blob", MediaType: "text/plain"}); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range names.Bad {
		err := checkOutput(Output{Name: name, Type: "blob", MediaType: "text/plain"})
		var failure *codes.Failure
		if !errors.As(err, &failure) || failure.Code != artifactInvalid || *failure.Retryable {
			t.Errorf("%q: %v", name, err)
		} else if strings.ContainsFunc(failure.Message, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("the message holds the name as it is: %q", failure.Message)
		}
	}
}

func TestTypesAndMediaTypesHaveRulesToo(t *testing.T) {
	t.Parallel()
	for _, output := range []Output{
		{Name: "a", Type: "Blob", MediaType: "text/plain"},
		{Name: "a", Type: "", MediaType: "text/plain"},
		{Name: "a", Type: "blob", MediaType: "text"},
		{Name: "a", Type: "blob", MediaType: "text/plain\n"},
	} {
		if checkOutput(output) == nil {
			t.Errorf("%+v was taken", output)
		}
	}
}
