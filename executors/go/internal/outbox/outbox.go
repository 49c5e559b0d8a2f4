// Package outbox keeps events that are not known to be stored: numbered, gathered into frames, kept, sent again.
//
// It is pure: time comes in, frames go out. One outbox serves all jobs of an executor, one goroutine at a time.
package outbox

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// When a frame leaves, and how large it gets.
const (
	MaxBatchBytes  = 1 << 20
	MaxBatchEvents = 500 // a frame costs as much as some ten events
	GatheredBytes  = 256 << 10
	// GatherDelay is how long running and progress wait for company, since nobody waits for them: of a short step all
	// leaves in one frame.
	GatherDelay = 10 * time.Millisecond
	// MaxUnsentProgress of one job, beyond which a newer one is merged into the last.
	MaxUnsentProgress = 8
)

type state int

const (
	queued state = iota
	sent
	held   // refused: its cause is being mended
	paused // nobody is there to hear of its lease
	gone   // acknowledged or dropped; still in the queue
)

// Entry is one event on its way.
type Entry struct {
	Event *rarav1.ProgressEvent
	// FirstSentAt is on the caller's clock; WasSent tells whether it means anything.
	FirstSentAt time.Duration
	WasSent     bool

	size     int
	order    int
	queuedAt time.Duration
	state    state
}

// Sequence is the event's number within its lease.
func (e *Entry) Sequence() int64 { return e.Event.Sequence }

func (e *Entry) isProgress() bool { return e.Event.GetProgress() != nil }

func (e *Entry) isGathered() bool { return e.isProgress() || e.Event.GetRunning() != nil }

// lane holds the events of one lease.
type lane struct {
	last, acked    int64
	unsentProgress int
	isPaused       bool
	entries        map[int64]*Entry
}

// Outbox of one executor.
type Outbox struct {
	EventWindow int // events that may be sent and not acknowledged
	InFlight    int // sent in this session and not answered
	HeldBytes   int

	lanes       map[int64]*lane
	queue       []*Entry
	urgent      int // queued entries that do not wait for company
	queued      int
	queuedBytes int
	orders      int
}

// New is empty, with a window that holds until a session names its own.
func New() *Outbox {
	return &Outbox{EventWindow: 1000, lanes: map[int64]*lane{}}
}

// Add numbers the event and takes it in. Its lease must be set. Returns its sequence number.
//
// A progress event is merged into the lease's last one, if that was never sent and there is pressure: no session, a
// full window, or many unsent ones.
func (o *Outbox) Add(event *rarav1.ProgressEvent, now time.Duration, connected bool) int64 {
	l := o.lane(event.Lease.LeaseToken)
	if last := l.entries[l.last]; event.GetProgress() != nil && last != nil {
		pressed := !connected || l.isPaused || o.InFlight >= o.EventWindow || l.unsentProgress >= MaxUnsentProgress
		// What was sent before, and is queued again, may be stored: under its number nothing else may be said.
		if pressed && last.isProgress() && (last.state == queued || last.state == paused) && !last.WasSent {
			o.merge(last, event)
			return last.Sequence()
		}
	}
	l.last++
	event.Sequence = l.last
	o.orders++
	entry := &Entry{Event: event, size: proto.Size(event), order: o.orders, queuedAt: now}
	l.entries[event.Sequence] = entry
	o.HeldBytes += entry.size
	o.enqueue(entry)
	return entry.Sequence()
}

// DueIn tells how long the next frame may wait; 0: it should leave now. False: nothing can be sent.
func (o *Outbox) DueIn(now time.Duration) (time.Duration, bool) {
	if o.queued == 0 || o.InFlight >= o.EventWindow {
		return 0, false
	}
	if o.urgent > 0 || o.queued >= MaxBatchEvents || o.queuedBytes >= GatheredBytes {
		return 0, true
	}
	o.skipGone()
	return max(0, o.queue[0].queuedAt+GatherDelay-now), true
}

// Take returns the events of the next frame, oldest first; they count as sent.
func (o *Outbox) Take(now time.Duration) []*rarav1.ProgressEvent {
	var events []*rarav1.ProgressEvent
	size := 0
	for len(events) < MaxBatchEvents && o.InFlight < o.EventWindow {
		o.skipGone()
		if len(o.queue) == 0 {
			break
		}
		entry := o.queue[0]
		if len(events) > 0 && size+entry.size > MaxBatchBytes {
			break
		}
		o.pop()
		o.uncount(entry)
		entry.state = sent
		if !entry.WasSent {
			entry.WasSent, entry.FirstSentAt = true, now
		}
		o.InFlight++
		size += entry.size
		events = append(events, entry.Event)
	}
	return events
}

// Acknowledge takes in that everything up to sequence is stored, but for the missing numbers, which are queued again.
// Returns the entries that are stored now, in order.
func (o *Outbox) Acknowledge(token, sequence int64, missing []int64) []*Entry {
	l := o.lanes[token]
	if l == nil {
		return nil
	}
	var done []*Entry
	for number, entry := range l.entries {
		if number <= sequence && !slices.Contains(missing, number) {
			done = append(done, entry)
		}
	}
	if len(done) > 1 {
		slices.SortFunc(done, func(a, b *Entry) int { return cmp.Compare(a.Sequence(), b.Sequence()) })
	}
	for _, entry := range done {
		delete(l.entries, entry.Sequence())
		o.forget(entry)
	}
	l.acked = max(l.acked, min(sequence, l.last))
	for _, number := range slices.Sorted(slices.Values(missing)) {
		if entry := l.entries[number]; entry != nil && entry.state == sent {
			o.InFlight--
			o.enqueue(entry)
		}
	}
	return done
}

// Hold keeps a refused event until Resend, Replace or Drop. False: it is not here.
func (o *Outbox) Hold(token, sequence int64) bool {
	entry := o.find(token, sequence)
	if entry == nil {
		return false
	}
	switch entry.state {
	case sent:
		o.InFlight--
	case queued:
		o.uncount(entry)
	}
	entry.state = held
	return true
}

// Resend sends a held event again, as it is.
func (o *Outbox) Resend(token, sequence int64) {
	if entry := o.find(token, sequence); entry != nil && entry.state == held {
		o.enqueue(entry)
	}
}

// Replace puts a terminal event in the place of a held one; what came after it is dropped.
func (o *Outbox) Replace(event *rarav1.ProgressEvent, sequence int64) {
	token := event.Lease.LeaseToken
	entry := o.find(token, sequence)
	if entry == nil {
		return
	}
	l := o.lanes[token]
	for number, later := range l.entries {
		if number > sequence {
			delete(l.entries, number)
			o.forget(later)
		}
	}
	l.last = sequence
	event.Sequence = sequence
	if entry.state == queued {
		o.uncount(entry)
	}
	o.HeldBytes -= entry.size
	entry.Event, entry.size = event, proto.Size(event)
	o.HeldBytes += entry.size
	if entry.state != sent {
		o.enqueue(entry)
	}
}

// Drop forgets the lease with all its events.
func (o *Outbox) Drop(token int64) {
	if l := o.lanes[token]; l != nil {
		for _, entry := range l.entries {
			o.forget(entry)
		}
		delete(o.lanes, token)
	}
}

// Pause takes in that the lease's own stream has ended: its events wait for the next, outside of the window.
func (o *Outbox) Pause(token int64) {
	l := o.lane(token)
	l.isPaused = true
	for _, entry := range l.entries {
		switch entry.state {
		case sent:
			o.InFlight--
		case queued:
			o.uncount(entry)
		}
		if entry.state != held {
			entry.state = paused
		}
	}
	// Queued again, they must not be found at their old places, before what was sent earlier.
	o.queue = slices.DeleteFunc(o.queue, func(entry *Entry) bool { return entry.Event.Lease.LeaseToken == token })
}

// Resume takes in that the lease has a stream again: what waited, and what was sent and not acknowledged, is queued
// anew.
func (o *Outbox) Resume(token int64) {
	l := o.lane(token)
	l.isPaused = false
	for _, number := range slices.Sorted(maps.Keys(l.entries)) {
		if entry := l.entries[number]; entry.state == paused {
			o.enqueue(entry)
		}
	}
}

// Rewind takes in that the session has ended: what was sent and not acknowledged is sent again in the next one.
func (o *Outbox) Rewind() {
	var again []*Entry
	for _, l := range o.lanes {
		l.unsentProgress = 0
		for _, entry := range l.entries {
			if entry.state == sent || entry.state == queued {
				again = append(again, entry)
			}
		}
	}
	slices.SortFunc(again, func(a, b *Entry) int { return cmp.Compare(a.order, b.order) })
	o.queue = nil
	o.InFlight, o.urgent, o.queued, o.queuedBytes = 0, 0, 0, 0
	for _, entry := range again {
		o.enqueue(entry)
	}
}

// Holds tells whether anything of the lease is not known to be stored.
func (o *Outbox) Holds(token int64) bool {
	l := o.lanes[token]
	return l != nil && len(l.entries) > 0
}

// IsEmpty tells whether everything of all leases is known to be stored.
func (o *Outbox) IsEmpty() bool {
	for _, l := range o.lanes {
		if len(l.entries) > 0 {
			return false
		}
	}
	return true
}

// Sequences returns the newest number made, and the newest known to be stored.
func (o *Outbox) Sequences(token int64) (last, acked int64) {
	if l := o.lanes[token]; l != nil {
		return l.last, l.acked
	}
	return 0, 0
}

func (o *Outbox) lane(token int64) *lane {
	l := o.lanes[token]
	if l == nil {
		l = &lane{entries: map[int64]*Entry{}}
		o.lanes[token] = l
	}
	return l
}

func (o *Outbox) find(token, sequence int64) *Entry {
	if l := o.lanes[token]; l != nil {
		return l.entries[sequence]
	}
	return nil
}

// merge puts the newer message under the older number; a checkpoint that was not sent is never lost with it.
func (o *Outbox) merge(last *Entry, event *rarav1.ProgressEvent) {
	if event.GetProgress().Checkpoint == nil {
		event.GetProgress().Checkpoint = last.Event.GetProgress().Checkpoint
		event.GetProgress().CheckpointArtifacts = last.Event.GetProgress().CheckpointArtifacts
	}
	event.Sequence = last.Sequence()
	size := proto.Size(event)
	o.HeldBytes += size - last.size
	if last.state == queued {
		o.queuedBytes += size - last.size
	}
	last.Event, last.size = event, size
}

func (o *Outbox) enqueue(entry *Entry) {
	if o.lanes[entry.Event.Lease.LeaseToken].isPaused {
		entry.state = paused
		return
	}
	entry.state = queued
	o.queue = append(o.queue, entry)
	o.queued++
	o.queuedBytes += entry.size
	if !entry.isGathered() {
		o.urgent++
	} else if entry.isProgress() {
		o.lanes[entry.Event.Lease.LeaseToken].unsentProgress++
	}
}

// uncount takes in that the entry is no longer among the queued ones.
func (o *Outbox) uncount(entry *Entry) {
	o.queued--
	o.queuedBytes -= entry.size
	if !entry.isGathered() {
		o.urgent--
	} else if l := o.lanes[entry.Event.Lease.LeaseToken]; l != nil && entry.isProgress() {
		l.unsentProgress--
	}
}

func (o *Outbox) forget(entry *Entry) {
	switch entry.state {
	case sent:
		o.InFlight--
	case queued:
		o.uncount(entry)
	}
	entry.state = gone
	o.HeldBytes -= entry.size
}

func (o *Outbox) skipGone() {
	for len(o.queue) > 0 && o.queue[0].state != queued {
		o.pop()
	}
}

func (o *Outbox) pop() {
	o.queue[0] = nil // or the array behind the queue would keep it
	o.queue = o.queue[1:]
}
