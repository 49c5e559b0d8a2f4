package codes_test

import (
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

func TestWhichCodesAHandlerMayUse(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]bool{
		"TOOL_FAILED":                    true,
		"HTTP_503":                       true,
		"RATE_LIMITED":                   true,
		"FAILED":                         false, // one word
		"tool_failed":                    false,
		"TOOL__FAILED":                   false,
		"LEASE_EXPIRED":                  false, // the executor's to say
		"A_" + strings.Repeat("B", 61):   true,
		"A_" + strings.Repeat("B", 62):   false,
		"TOOL_FAILED\nsomething further": false,
	} {
		if got := codes.IsForHandlers(code); got != want {
			t.Errorf("IsForHandlers(%q) = %v", code, got)
		}
	}
}
