// Package codes holds the codes of errors, refusals and reasons that an executor meets on the wire.
package codes

import "regexp"

// The contract's own codes, spelled as they cross the wire.
const (
	HandlerFailed         = "HANDLER_FAILED"
	HandlerPanic          = "HANDLER_PANIC"
	RunnerCrashed         = "RUNNER_CRASHED"
	DependencyUnavailable = "DEPENDENCY_UNAVAILABLE"
	Internal              = "INTERNAL"
	LeaseExpired          = "LEASE_EXPIRED"
	AttemptTimeout        = "ATTEMPT_TIMEOUT"
	ProgressTimeout       = "PROGRESS_TIMEOUT"
	ArtifactMismatch      = "ARTIFACT_MISMATCH"
	ArtifactMissing       = "ARTIFACT_MISSING"
	ExecutorShutdown      = "EXECUTOR_SHUTDOWN"
	UnsupportedKind       = "UNSUPPORTED_KIND"
	NoCapacity            = "NO_CAPACITY"
	InputInvalid          = "INPUT_INVALID"
	SecretUnresolved      = "SECRET_UNRESOLVED"
	SecretInPayload       = "SECRET_IN_PAYLOAD"
	PayloadInvalid        = "PAYLOAD_INVALID"
	PayloadTooLarge       = "PAYLOAD_TOO_LARGE"
	ArtifactTooLarge      = "ARTIFACT_TOO_LARGE"
	QuotaExceeded         = "QUOTA_EXCEEDED"
	DeadlineExceeded      = "DEADLINE_EXCEEDED"
	Cancelled             = "CANCELLED"
	LeaseLost             = "LEASE_LOST"
	BlobsMissing          = "BLOBS_MISSING"
	FieldInvalid          = "FIELD_INVALID"
	LeaseUnknown          = "LEASE_UNKNOWN"
	VersionUnsupported    = "PROTOCOL_VERSION_UNSUPPORTED"
	CredentialInvalid     = "CREDENTIAL_INVALID"
)

// MaxChars is the longest code.
const MaxChars = 63

var shape = regexp.MustCompile(`^[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+$`)

// What a handler may not say of itself: these name facts that only the executor or the scheduler knows.
var notForHandlers = map[string]bool{
	RunnerCrashed: true, HandlerPanic: true, LeaseExpired: true, LeaseLost: true, AttemptTimeout: true,
	ProgressTimeout: true, "DISPATCH_LOST": true, ExecutorShutdown: true, UnsupportedKind: true, NoCapacity: true,
	"NO_CAPABLE_EXECUTOR": true, "ATTEMPTS_EXHAUSTED": true, DeadlineExceeded: true, "SIBLING_FAILED": true,
	"UPSTREAM_FAILED": true, BlobsMissing: true, FieldInvalid: true,
}

// IsForHandlers tells whether a handler may fail with this code: two words or more, upper snake case, not ours alone.
func IsForHandlers(code string) bool {
	return len(code) <= MaxChars && shape.MatchString(code) && !notForHandlers[code]
}

// Failure ends an attempt with a code. Retryable nil: by the code's default.
type Failure struct {
	Code      string
	Message   string // for people; never a secret or a payload
	Retryable *bool
}

func (f *Failure) Error() string { return f.Code + ": " + f.Message }
