package rara

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/engine"
	"github.com/rara-run/rara/executors/go/internal/payload"
	"github.com/rara-run/rara/executors/go/internal/text"
)

// Error ends an attempt with a code. A handler returns it, or wraps it; any other error is a HANDLER_FAILED.
type Error struct {
	// Code is two words or more in upper snake case, of at most 63 characters.
	Code string
	// Message is for people. Secrets that the job was given are replaced in it.
	Message string
	// Retryable tells whether another attempt may help; nil leaves it to the code's default, which is to try again for
	// every code that docs/reference/failures.md does not call final.
	Retryable *bool
	// RetryAfter: no next attempt before that time has passed. 0: the backoff alone.
	RetryAfter time.Duration
	// Details are for programs: anything that becomes JSON, never a secret.
	Details any
	// Err is the cause, for errors.Is and errors.As.
	Err error
}

// Error is the code and the message.
func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Unwrap is the cause.
func (e *Error) Unwrap() error { return e.Err }

// Retryable is a failure that another attempt may heal. The arguments are those of fmt.Errorf, %w included.
func Retryable(code, format string, args ...any) *Error { return newError(code, true, format, args) }

// Terminal is a failure that no other attempt can heal. The arguments are those of fmt.Errorf, %w included.
func Terminal(code, format string, args ...any) *Error { return newError(code, false, format, args) }

func newError(code string, retryable bool, format string, args []any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Retryable: &retryable, Err: errors.Unwrap(err)}
}

// CancelReason is why the handler with this context is to stop, a code of docs/reference/failures.md; empty while it
// is not.
func CancelReason(ctx context.Context) string { return engine.ReasonOf(ctx) }

// failed is a handler's error as the contract has it.
func failed(err error, limitBytes int) *engine.Failed {
	var own *Error
	var ours *codes.Failure
	switch {
	case errors.As(err, &own):
		return ownFailed(own, limitBytes)
	case errors.As(err, &ours):
		return &engine.Failed{Code: ours.Code, Message: err.Error(), Retryable: ours.Retryable}
	default:
		return &engine.Failed{Code: codes.HandlerFailed, Message: err.Error()}
	}
}

func ownFailed(own *Error, limitBytes int) *engine.Failed {
	out := &engine.Failed{
		Code: own.Code, Message: own.Message, Retryable: own.Retryable, RetryAfter: own.RetryAfter}
	if !codes.IsForHandlers(own.Code) {
		out.Code = codes.HandlerFailed
		out.Message = fmt.Sprintf(
			"[code %q is not one a handler can use: capital words joined by _, at least two, and none of Rara's own] %s",
			text.Cut(text.Valid(own.Code), 200), own.Message)
	}
	if own.Details == nil {
		return out
	}
	details, err := payload.Encode(own.Details, "details", limitBytes)
	var problem *codes.Failure
	switch {
	case err == nil:
		out.Details = details
	case errors.As(err, &problem) && problem.Code == codes.PayloadTooLarge: // cut, so that the error survives
		out.Details, _ = payload.Encode(map[string]any{"cut": true, "reason": problem.Message}, "details", limitBytes)
	default:
		out.Message += fmt.Sprintf(" [details left out: %v]", err)
	}
	return out
}

// encoded is a handler's output as JSON, or why it cannot be one. A panic of the type's own MarshalJSON is a failure of
// the handler like any other.
func encoded(value any, limitBytes int) ([]byte, *engine.Failed) {
	output, err := payload.Encode(value, "output", limitBytes)
	if err != nil {
		return nil, failed(err, limitBytes)
	}
	return output, nil
}
