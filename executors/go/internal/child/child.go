package child

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rara-run/rara/executors/go/internal/blobs"
	"github.com/rara-run/rara/executors/go/internal/engine"
	"github.com/rara-run/rara/executors/go/internal/leaseclock"
	"github.com/rara-run/rara/executors/go/internal/logs"
	"github.com/rara-run/rara/executors/go/internal/redact"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const leaseCheck = 100 * time.Millisecond

// IsChild tells whether this process was started to run one job.
func IsChild() bool { return os.Getenv(mark) != "" }

// Serve runs the one job of this process. find: the handler of a kind and version; nil: there is none. last is called
// when the handler has ended: its outcome ends this process.
func Serve(find func(kind, version string) engine.Handler, logger *slog.Logger, last func()) error {
	os.Unsetenv(mark) // a program that the handler starts is no child of ours
	c := &child{writer: newWriter(os.NewFile(toParentFile, "to parent")), replies: map[int64]chan *reply{}}
	for _, file := range []int{fromParentFile, toParentFile} {
		syscall.CloseOnExec(file)
	}
	decoder := json.NewDecoder(os.NewFile(fromParentFile, "from parent"))
	var first toChild
	if err := decoder.Decode(&first); err != nil {
		return fmt.Errorf("no job came: %w", err)
	}
	if first.Start == nil {
		return errors.New("the first message was no job")
	}
	work, err := c.work(first.Start, logger)
	if err != nil {
		return err
	}
	ctx, interrupt := engine.HandlerContext(context.Background(), work.Request, work.EndsAt)
	go c.listen(decoder, interrupt)
	go c.keepToLease()
	handler := find(work.Request.Kind, work.Request.KindVersion)
	if handler == nil {
		return fmt.Errorf("no handler for %s %s", work.Request.Kind, work.Request.KindVersion)
	}
	finished := make(chan error, 1)
	go engine.Call(ctx, handler, work, func(output []byte, failed *engine.Failed) {
		last()
		finished <- c.writer.send(toParent{Done: &done{output, failed}})
	})
	return <-finished
}

// child is the handler's end.
type child struct {
	writer  *writer
	scratch string
	// leaseOver as last heard; 0: not yet.
	leaseOver atomic.Int64

	mu      sync.Mutex
	last    int64
	replies map[int64]chan *reply
}

func (c *child) work(given *start, logger *slog.Logger) (*engine.Work, error) {
	c.scratch = given.Scratch
	var redactor redact.Redactor
	for _, secret := range given.Secrets {
		redactor.Add(secret)
	}
	job := &rarav1.JobRequest{}
	if err := proto.Unmarshal(given.Request, job); err != nil {
		return nil, err
	}
	work := &engine.Work{Request: job, Secrets: given.Secrets, Scratch: given.Scratch,
		MaxPayloadBytes: given.MaxPayloadBytes, Port: c,
		Logger: engine.HandlerLogger(logs.Redacted(logger, &redactor), job)}
	if given.LeftMs > 0 {
		work.EndsAt = time.Now().Add(time.Duration(given.LeftMs) * time.Millisecond)
	}
	return work, nil
}

func (c *child) listen(decoder *json.Decoder, interrupt context.CancelCauseFunc) {
	for {
		var message toChild
		if decoder.Decode(&message) != nil {
			endAll() // without its executor nobody renews the lease
			return
		}
		if message.LeaseOver != 0 {
			c.leaseOver.Store(int64(message.LeaseOver))
		}
		if message.Cancel != "" {
			interrupt(&engine.Stopped{Reason: message.Cancel})
		}
		if answer := message.Reply; answer != nil {
			c.mu.Lock()
			waiting := c.replies[answer.ID]
			delete(c.replies, answer.ID)
			c.mu.Unlock()
			if waiting != nil {
				waiting <- answer
			}
		}
	}
}

// keepToLease ends what runs on when the lease is over: the executor should have done so, and stands still. At that
// instant, for soon after it another executor may have begun.
func (c *child) keepToLease() {
	for {
		time.Sleep(min(leaseCheck, c.left()))
	}
}

// left of the lease; with nothing left this process ends.
func (c *child) left() time.Duration {
	over := c.LeaseOver()
	if over == 0 {
		return leaseCheck // not told yet
	}
	left := over - leaseclock.Now()
	if left <= 0 {
		endAll()
	}
	return left
}

// endAll ends the handler and what it started.
func endAll() { _ = syscall.Kill(-syscall.Getpgrp(), syscall.SIGKILL) }

// LeaseOver is Port's, as are the next.
func (c *child) LeaseOver() time.Duration { return time.Duration(c.leaseOver.Load()) }

func (c *child) Progress(report engine.Report) error {
	c.left() // this process may have stood still past its lease, and the handler go on before anybody has looked
	return c.writer.send(toParent{Progress: &report})
}

func (c *child) RecordEffect(ctx context.Context, name string, result []byte) error {
	_, err := c.ask(ctx, &request{Effect: name, Result: result})
	return err
}

func (c *child) OpenInput(ctx context.Context, name string) (string, error) {
	return c.path(ctx, &request{Open: name})
}

func (c *child) OpenCheckpoint(ctx context.Context, name string) (string, error) {
	return c.path(ctx, &request{OpenCheckpoint: name})
}

func (c *child) path(ctx context.Context, asked *request) (string, error) {
	answer, err := c.ask(ctx, asked)
	if err != nil {
		return "", err
	}
	return answer.Path, nil
}

func (c *child) PutOutput(ctx context.Context, output engine.Output, content io.Reader) (*rarav1.Digest, error) {
	return c.store(ctx, &request{Put: &output}, content)
}

func (c *child) Keep(ctx context.Context, content io.Reader) (*rarav1.Digest, error) {
	return c.store(ctx, &request{Keep: true}, content)
}

func (c *child) store(ctx context.Context, asked *request, content io.Reader) (*rarav1.Digest, error) {
	if err := os.MkdirAll(c.scratch, 0o700); err != nil {
		return nil, err
	}
	file, err := os.CreateTemp(c.scratch, "put-")
	if err != nil {
		return nil, err
	}
	file.Close()
	if _, err := blobs.Keep(content, file.Name()); err != nil {
		return nil, err
	}
	asked.Path = filepath.Clean(file.Name())
	answer, err := c.ask(ctx, asked)
	if err != nil {
		return nil, err
	}
	return answer.Digest, nil
}

// OnKill means nothing in the child itself.
func (c *child) OnKill(func()) bool { return true }

func (c *child) ask(ctx context.Context, asked *request) (*reply, error) {
	answered := make(chan *reply, 1)
	c.mu.Lock()
	c.last++
	asked.ID = c.last
	c.replies[asked.ID] = answered
	c.mu.Unlock()
	if err := c.writer.send(toParent{Request: asked}); err != nil {
		return nil, err
	}
	select {
	case answer := <-answered:
		if answer.Failure != nil {
			return nil, answer.Failure
		}
		return answer, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
