package child

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/engine"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// Run is a handler that runs the job's real handler in a child.
func Run(ctx context.Context, work *engine.Work) ([]byte, *engine.Failed) {
	traced := *work
	traced.Request = engine.TracedRequest(ctx, work.Request)
	p, err := launch(&traced)
	if err != nil {
		return nil, &engine.Failed{Code: codes.RunnerCrashed, Message: "no process could be started: " + err.Error()}
	}
	return p.serve(ctx)
}

const renewEvery = 200 * time.Millisecond

// parent is the executor's end of one child.
type parent struct {
	work     *engine.Work
	command  *exec.Cmd
	incoming *os.File
	outgoing *os.File
	writer   *writer
	requests sync.WaitGroup
	over     atomic.Bool // its number may soon be another process's
}

func launch(work *engine.Work) (*parent, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	fromChild, childOut, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	childIn, toChild, err := os.Pipe()
	if err != nil {
		fromChild.Close()
		childOut.Close()
		return nil, err
	}
	defer childOut.Close()
	defer childIn.Close()
	command := exec.Command(path)
	command.Env = append(os.Environ(), mark+"=1")
	command.Stderr = os.Stderr
	command.ExtraFiles = []*os.File{childIn, childOut}
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := command.Start(); err != nil {
		fromChild.Close()
		toChild.Close()
		return nil, err
	}
	return &parent{work: work, command: command, incoming: fromChild, outgoing: toChild, writer: newWriter(toChild)}, nil
}

// serve the child until its end, and with it the end of all that it has started.
func (p *parent) serve(ctx context.Context) ([]byte, *engine.Failed) {
	serving, cancel := context.WithCancel(ctx)
	defer cancel()
	if !p.work.OnKill(p.kill) {
		p.kill()
	}
	_ = p.writer.send(toChild{Start: p.start()}) // a child that died says so by its end
	stopRenewing := p.renewing()
	stopAsking := context.AfterFunc(ctx, func() { _ = p.writer.send(toChild{Cancel: engine.ReasonOf(ctx)}) })
	said := p.converse(serving)
	p.kill() // what is left of its group
	p.over.Store(true)
	stopAsking()
	stopRenewing()
	p.outgoing.Close()
	p.incoming.Close()
	cancel() // nobody waits for an answer any more
	p.requests.Wait()
	err := p.command.Wait()
	if said != nil {
		return said.Output, said.Failed
	}
	return nil, crashed(p.command.ProcessState, err)
}

// renewing tells the child until when it may live: it ends itself, should this process stand still past the lease.
func (p *parent) renewing() (stop func()) {
	over := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		ticker := time.NewTicker(renewEvery)
		defer ticker.Stop()
		last := time.Duration(0)
		for {
			if now := p.work.LeaseOver(); now != last {
				last = now
				_ = p.writer.send(toChild{LeaseOver: now})
			}
			select {
			case <-ticker.C:
			case <-over:
				return
			}
		}
	})
	return func() {
		close(over)
		p.outgoing.Close() // nobody may read what is being written
		done.Wait()
	}
}

// kill the child, and what it has started.
func (p *parent) kill() {
	if !p.over.Load() {
		_ = syscall.Kill(-p.command.Process.Pid, syscall.SIGKILL)
	}
}

func (p *parent) start() *start {
	begin := &start{Secrets: p.work.Secrets, Scratch: p.work.Scratch, MaxPayloadBytes: p.work.MaxPayloadBytes}
	begin.Request, _ = proto.Marshal(p.work.Request) // it came over the wire
	if !p.work.EndsAt.IsZero() {
		begin.LeftMs = max(1, time.Until(p.work.EndsAt).Milliseconds())
	}
	return begin
}

// converse until the child has said how it ended; nil: it died before.
func (p *parent) converse(ctx context.Context) *done {
	decoder := json.NewDecoder(p.incoming)
	for {
		var message toParent
		switch err := decoder.Decode(&message); {
		case err != nil:
			return nil
		case message.Done != nil:
			return message.Done
		case message.Progress != nil:
			_ = p.work.Progress(*message.Progress)
		case message.Request != nil:
			p.requests.Go(func() { p.answer(ctx, message.Request) })
		}
	}
}

func (p *parent) answer(ctx context.Context, asked *request) {
	answer := &reply{ID: asked.ID}
	var err error
	switch {
	case asked.Effect != "":
		err = p.work.RecordEffect(ctx, asked.Effect, asked.Result)
	case asked.Open != "":
		answer.Path, err = p.work.OpenInput(ctx, asked.Open)
	case asked.OpenCheckpoint != "":
		answer.Path, err = p.work.OpenCheckpoint(ctx, asked.OpenCheckpoint)
	case asked.Put != nil, asked.Keep:
		answer.Digest, err = p.put(ctx, asked)
	}
	answer.Failure = asFailure(err)
	_ = p.writer.send(toChild{Reply: answer})
}

func (p *parent) put(ctx context.Context, asked *request) (*rarav1.Digest, error) {
	file, err := os.Open(asked.Path)
	if err != nil {
		return nil, err
	}
	defer os.Remove(asked.Path)
	defer file.Close()
	if asked.Keep {
		return p.work.Keep(ctx, file)
	}
	return p.work.PutOutput(ctx, *asked.Put, file)
}

// crashed is the failure of a process that ended before its handler did.
func crashed(state *os.ProcessState, err error) *engine.Failed {
	failed := &engine.Failed{Code: codes.RunnerCrashed, Message: fmt.Sprintf("the runner ended: %v", err)}
	if state == nil {
		return failed
	}
	failed.Exit = &rarav1.RunnerExit{}
	if usage, ok := state.SysUsage().(*syscall.Rusage); ok {
		failed.Exit.PeakMemoryBytes = new(usage.Maxrss << 10)
	}
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		failed.Exit.Signal = new(int32(status.Signal()))
	} else {
		failed.Exit.ExitCode = new(int32(state.ExitCode()))
	}
	return failed
}
