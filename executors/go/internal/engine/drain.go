package engine

import (
	"time"
)

const (
	// Of the stop bound, what is kept for asking, killing and the last acknowledgements.
	lastWordsFraction = 0.3
	maxLastWords      = 3 * time.Second
	// Of the last words, what is left when no more acknowledgements are waited for: Goodbye, and the end of the process.
	endFraction = 3
	// How long acknowledgements are waited for after an operator's drain, which has no bound of its own.
	acksBound = 30 * time.Second
	// How long an answer to Goodbye is waited for where it says what became of jobs.
	goodbyeBound = 5 * time.Second
)

// drain is the end of an executor: no new job, running ones finish or are handed back, the last word is Goodbye. It is
// begun by our own stop, which has a bound, or by an operator, who may give one, and ends with one log line. Guarded by
// the supervisor's mutex.
type drain struct {
	supervisor *Supervisor
	begun      chan struct{}
	beganAt    time.Time // zero: not yet
	isTold     bool
	stopBy     time.Time // by our own stop; zero: not bound
	finishBy   time.Time // by the operator's word; zero: not bound
}

func newDrain(s *Supervisor) *drain { return &drain{supervisor: s, begun: make(chan struct{})} }

// stop ends the executor within the stop bound from now. A repeat changes nothing.
func (d *drain) stop() {
	if d.stopBy.IsZero() {
		d.stopBy = time.Now().Add(d.supervisor.config.Stop)
	}
	d.begin()
}

// asked: an operator wants it. nil: what runs may take as long as it needs.
func (d *drain) asked(finishWithin *time.Duration) {
	if finishWithin != nil {
		d.finishBy = time.Now().Add(*finishWithin)
	}
	d.begin()
}

func (d *drain) begin() {
	if d.beganAt.IsZero() {
		d.beganAt = time.Now()
		close(d.begun)
	}
	d.supervisor.afterChange() // a bound has moved
}

// run goes from begun to the end. over: closed when the sessions have ended; wasHeard: then, whether our Goodbye was
// heard. Called without the mutex.
func (d *drain) run(over <-chan struct{}, wasHeard func() bool) {
	s := d.supervisor
	s.locked(func() {
		s.tally = &tally{rejected: map[int64]bool{}}
		var within *time.Duration
		var withinSeconds any // nil: without bound
		if at := d.finishAt(); !at.IsZero() {
			within = new(max(0, time.Until(at)))
			withinSeconds = within.Seconds()
		}
		s.config.Logger.Info("executor.draining", "finish_within_s", withinSeconds, "running", s.running())
		s.beginDrain(within)
	})
	d.until(over, func() bool { return s.running() == 0 }, d.finishAt)
	s.locked(func() { s.handBack(d.lastWords() / 2) })
	acksBy, end := time.Now().Add(acksBound), d.lastWords()/endFraction
	d.until(over, func() bool { return len(s.jobs) == 0 }, func() time.Time {
		if d.stopBy.IsZero() {
			return acksBy
		}
		return earlier(acksBy, d.stopBy.Add(-end))
	})
	patience := end / 2
	s.locked(func() {
		if len(s.jobs) > 0 || s.leaked > 0 {
			s.config.Logger.Warn("executor.ended_with_jobs", "held_jobs", len(s.jobs), "leaked", s.leaked)
		}
		if s.session != nil {
			s.session.goodbye()
		}
		patience = d.goodbyePatience(patience)
	})
	isOver := false
	select {
	case <-over:
		isOver = true
	case <-time.After(patience):
	}
	s.locked(func() { d.tell(isOver && wasHeard()) })
}

// tell says what became of the jobs, once, if a stop or a drain was asked for.
func (d *drain) tell(wasHeard bool) {
	if d.beganAt.IsZero() || d.isTold {
		return
	}
	d.isTold = true
	s := d.supervisor
	if s.tally == nil {
		s.tally = &tally{}
	}
	// A dialled executor's end tells nobody: what it still holds is somebody's when its lease has expired.
	s.tally.close(len(s.jobs), wasHeard, s.config.Listen == "")
	s.tally.say(s.config.Logger, time.Since(d.beganAt))
}

// goodbyePatience is how long an answer to Goodbye is waited for: longer where it says what became of jobs.
func (d *drain) goodbyePatience(least time.Duration) time.Duration {
	s := d.supervisor
	if s.session == nil || len(s.jobs) == 0 && len(s.tally.rejected) == 0 {
		return least
	}
	if d.stopBy.IsZero() {
		return goodbyeBound
	}
	return max(least, min(goodbyeBound, time.Until(d.stopBy)-least))
}

func (d *drain) lastWords() time.Duration {
	return min(maxLastWords, time.Duration(lastWordsFraction*float64(d.supervisor.config.Stop)))
}

// finishAt is when what still runs is handed back; zero: never.
func (d *drain) finishAt() time.Time {
	if d.stopBy.IsZero() {
		return d.finishBy
	}
	return earlier(d.finishBy, d.stopBy.Add(-d.lastWords()))
}

// until waits for the condition, asked with the mutex, or the bound, which may move; zero: no bound.
func (d *drain) until(over <-chan struct{}, condition func() bool, bound func() time.Time) {
	s := d.supervisor
	for {
		var isMet bool
		var changed <-chan struct{}
		var at time.Time
		s.locked(func() { isMet, changed, at = condition(), s.nextChange(), bound() })
		if isMet {
			return
		}
		var late <-chan time.Time
		if !at.IsZero() {
			late = time.After(time.Until(at))
		}
		select {
		case <-changed:
		case <-late:
			return
		case <-over:
			return
		}
	}
}

// earlier of two instants, of which a zero one is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
