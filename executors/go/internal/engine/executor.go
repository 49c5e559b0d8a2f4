package engine

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/resolver/dns"

	"github.com/rara-run/rara/executors/go/internal/blobs"
	"github.com/rara-run/rara/executors/go/internal/leaseclock"
	"github.com/rara-run/rara/executors/go/internal/readyfile"
	"github.com/rara-run/rara/executors/go/internal/scratch"
)

const (
	readinessCheck = time.Second
	workBound      = time.Second // after the end, for what is still on its way
)

func init() {
	// A scheduler that comes back may have another address; gRPC would ask for it again after 30 s only.
	dns.SetMinResolutionInterval(time.Second)
}

// Executor builds every part, and owns the order of start and stop.
type Executor struct {
	config Config

	mu         sync.Mutex
	supervisor *Supervisor // while it runs
}

// New is an executor that has not begun.
func New(config Config) *Executor {
	if config.Versions == (Versions{}) {
		config.Versions = OurVersions
	}
	return &Executor{config: config}
}

// CutShort says what a stop that is not waited for leaves behind: the process ends now.
func (x *Executor) CutShort() {
	x.mu.Lock()
	s := x.supervisor
	x.mu.Unlock()
	if s != nil {
		s.locked(func() {
			s.drain.stop()
			s.drain.tell(false)
		})
	}
}

// IsReady tells whether jobs can come: the last heartbeats were answered in time, and leaked handlers leave a slot.
func (x *Executor) IsReady() bool {
	x.mu.Lock()
	s := x.supervisor
	x.mu.Unlock()
	return s != nil && s.isReady()
}

func (s *Supervisor) isReady() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.session != nil && s.session.isReady(leaseclock.Now()) && s.leaked < s.config.Slots
}

// Run holds the executor's whole life: until ctx is cancelled, then a drain within the stop bound; until an operator
// drains it; or until it is replaced. When it returns, every goroutine that it started has ended, but for handlers that
// ignore their context.
func (x *Executor) Run(ctx context.Context) error {
	folder, err := scratch.Open(x.config.Dir, x.config.ExecutorID)
	if err != nil {
		return err
	}
	defer folder.Close()
	// A connection of its own: an upload must not delay a heartbeat.
	connection, err := blobs.Dial(x.config.Scheduler, x.config.DialOptions...)
	if err != nil {
		return fmt.Errorf("scheduler %q: %w", x.config.Scheduler, err)
	}
	defer connection.Close()
	client := blobs.NewClient(connection, x.config.TransferPatience)
	store := &artifactStore{
		client:    client,
		cache:     blobs.NewCache(folder.Cache, folder.Jobs, x.config.CacheBytes, client.Download),
		transfers: make(chan struct{}, x.config.Transfers),
	}
	base, end := context.WithCancel(context.WithoutCancel(ctx))
	s := newSupervisor(base, x.config, store, folder.Jobs)
	x.setSupervisor(s)
	defer x.setSupervisor(nil)
	if err := s.serve(ctx, end); err != nil {
		return err
	}
	x.config.Logger.Info("executor.stopped")
	return nil
}

func (x *Executor) setSupervisor(s *Supervisor) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.supervisor = s
}

// serve keeps fences for longer than the drain, and the base context longer than handlers.
func (s *Supervisor) serve(ctx context.Context, end context.CancelFunc) error {
	defer s.waitForWork()
	defer s.locked(end)
	over := make(chan struct{})
	var result error
	var wasHeard bool // our Goodbye
	s.work.Go(func() {
		defer close(over)
		if s.config.Listen != "" {
			result = s.listen(s.base)
			wasHeard = result == nil // what was said before was the end of calls
		} else {
			wasHeard, result = s.connect(s.base)
		}
	})
	s.work.Go(func() { s.keepFences(s.base) })
	s.work.Go(func() { s.reportReadiness(s.base) })
	stopWaiting := context.AfterFunc(ctx, func() {
		s.config.Logger.Info("executor.stopping", "stop_s", s.config.Stop.Seconds())
		s.locked(s.drain.stop)
	})
	defer stopWaiting()
	select {
	case <-s.drain.begun:
		s.drain.run(over, func() bool { return wasHeard })
	case <-over: // replaced: what still runs must end, and nobody is there to hear of it
		by := time.Now().Add(s.drain.lastWords())
		s.locked(func() { s.handBack(s.drain.lastWords() / 2) })
		s.drain.until(nil, func() bool { return s.running() == 0 }, func() time.Time { return by })
	}
	s.locked(end)
	<-over
	return result
}

// waitForWork leaves behind what a file system does not answer: a secret on a mount that is gone must not keep a
// process from ending.
func (s *Supervisor) waitForWork() {
	done := make(chan struct{})
	go func() {
		s.work.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(workBound):
	}
}

func (s *Supervisor) reportReadiness(ctx context.Context) {
	ticker := time.NewTicker(readinessCheck)
	defer ticker.Stop()
	file := readyfile.New(s.config.ReadyFile, s.config.Logger)
	defer file.Show(false)
	wasReady, wasSaid := false, false
	for {
		ready := s.isReady()
		if ready != wasReady || !wasSaid {
			s.config.Logger.Info("executor.readiness_changed", "ready", ready)
			wasReady, wasSaid = ready, true
		}
		file.Show(ready)
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}
