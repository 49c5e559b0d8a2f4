// Package child runs a handler in a process of its own, which can be killed with all that it has started.
//
// The process is this program again, with a mark in its environment. The two speak JSON over a pipe each way; when the
// parent is gone the child ends itself, since nobody renews its lease.
package child

import (
	"encoding/json"
	"io"
	"sync"
	"time"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/engine"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// mark in the environment of a child.
const mark = "RARA_CHILD"

// Files of the child, after standard input, output and error.
const (
	fromParentFile = 3
	toParentFile   = 4
)

// toChild is one message to the child: the job, then cancels and replies.
type toChild struct {
	Start     *start
	LeaseOver time.Duration // when it is over, on the lease clock; 0: nothing new
	Cancel    string        // the reason
	Reply     *reply
}

type start struct {
	Request         []byte // a JobRequest
	Secrets         map[string]string
	Scratch         string
	MaxPayloadBytes int
	LeftMs          int64 // to the deadline or the end of the attempt; 0: there is neither
}

type reply struct {
	ID      int64
	Path    string
	Digest  *rarav1.Digest
	Failure *codes.Failure
}

// toParent is one message from the child; Done is the last.
type toParent struct {
	Progress *engine.Report
	Request  *request
	Done     *done
}

// request of an effect, the path of an input or of the checkpoint's artifact, or the storing of an output or for a
// checkpoint, answered by a reply with its ID.
type request struct {
	ID             int64
	Effect         string
	Result         []byte
	Open           string
	OpenCheckpoint string
	Put            *engine.Output
	Keep           bool
	Path           string // of the bytes to store
}

type done struct {
	Output []byte
	Failed *engine.Failed
}

// writer of messages, for several goroutines.
type writer struct {
	mu      sync.Mutex
	encoder *json.Encoder
}

func newWriter(to io.Writer) *writer { return &writer{encoder: json.NewEncoder(to)} }

func (w *writer) send(message any) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.encoder.Encode(message)
}

// asFailure makes an error that can cross.
func asFailure(err error) *codes.Failure {
	if err == nil {
		return nil
	}
	return engine.FailureOf(err, codes.DependencyUnavailable)
}
