package slots_test

import (
	"testing"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/slots"
)

func TestCreditIsWhatWasReceivedAndWhatIsFree(t *testing.T) {
	t.Parallel()
	s := slots.New(2, "go", []slots.Offer{{Kind: "a", Version: "1"}, {Kind: "b", Version: "1", MaxConcurrency: 1}})
	executorKind := "go"
	take := func(kind, version, code string, credit int64) {
		t.Helper()
		got := ""
		if refused := s.Take(executorKind, kind, version); refused != nil {
			got = refused.Code
		}
		if got != code || s.Credit() != credit {
			t.Errorf("%s %s: %q with credit %d, want %q with %d", kind, version, got, s.Credit(), code, credit)
		}
	}
	take("b", "1", "", 2)
	take("b", "1", codes.NoCapacity, 3) // of its kind
	take("b", "2", codes.UnsupportedKind, 4)
	take("a", "1", "", 4)
	take("a", "1", codes.NoCapacity, 5)
	executorKind = "python"
	take("a", "1", codes.UnsupportedKind, 6)
	executorKind = ""
	s.Leave("b")
	if s.Credit() != 7 {
		t.Errorf("a free slot raises the credit: %d", s.Credit())
	}
	s.NewSession()
	if s.Credit() != 1 {
		t.Errorf("credit counts from the session's begin: %d", s.Credit())
	}
	s.Draining = true
	take("b", "1", codes.ExecutorShutdown, 1)
}
