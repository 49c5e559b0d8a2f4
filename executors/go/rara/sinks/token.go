package sinks

import (
	"errors"
	"fmt"

	"github.com/rara-run/rara/executors/go/rara"
)

// ErrSuperseded means that a newer attempt has written: this one has changed nothing, and has no more to do.
//
// Return it: the scheduler drops what a superseded attempt says. Where several steps write to one place it ends the
// attempt as WRITE_SUPERSEDED, and the next attempt, whose token is larger, writes.
var ErrSuperseded = errors.New("a newer attempt has written")

// Superseded is the error of a write under this token. For sinks of one's own.
func Superseded(where string, token int64) error {
	return rara.Retryable("WRITE_SUPERSEDED", "%s: lease token %d: %w", where, token, ErrSuperseded)
}

// CheckToken returns an error for what no scheduler gives. For sinks of one's own.
func CheckToken(token int64) error {
	if token < 1 {
		return fmt.Errorf("lease token %d: must be 1 or more", token)
	}
	return nil
}
