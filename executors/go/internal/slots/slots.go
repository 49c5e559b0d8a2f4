// Package slots counts how many jobs this executor takes: slots, bounds of kinds, and the credit that follows.
package slots

import (
	"fmt"
	"strings"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

// Offer is one kind and version that can be run. MaxConcurrency: 0 is as many as there are slots.
type Offer struct {
	Kind, Version  string
	MaxConcurrency int
}

// NotTaken tells why a job is rejected before anything of it has run.
type NotTaken struct{ Code, Message string }

// Slots is not safe for several goroutines at once.
type Slots struct {
	Draining bool

	kind     string // of executor
	slots    int
	occupied int
	byKind   map[string]int
	received int64 // in this session
	offers   []Offer
}

// New has so many slots for these kinds of jobs, on this kind of executor.
func New(slots int, executorKind string, offers []Offer) *Slots {
	return &Slots{kind: executorKind, slots: slots, offers: offers, byKind: map[string]int{}}
}

// NewSession makes credit count from here.
func (s *Slots) NewSession() { s.received = 0 }

// Take gives a received job a slot, or tells why not. executorKind: what it was sent for; empty: any.
func (s *Slots) Take(executorKind, kind, version string) *NotTaken {
	s.received++
	if s.Draining {
		return &NotTaken{codes.ExecutorShutdown, "the executor drains"}
	}
	if executorKind != "" && executorKind != s.kind {
		return &NotTaken{codes.UnsupportedKind, fmt.Sprintf("this executor is of kind %s, not %.100s", s.kind, executorKind)}
	}
	for _, offer := range s.offers {
		if offer.Kind != kind || offer.Version != version {
			continue
		}
		if s.occupied >= s.slots || (offer.MaxConcurrency > 0 && s.byKind[kind] >= offer.MaxConcurrency) {
			return &NotTaken{codes.NoCapacity, "no slot is free"}
		}
		s.occupied++
		s.byKind[kind]++
		return nil
	}
	known := make([]string, 0, len(s.offers))
	for _, offer := range s.offers {
		known = append(known, offer.Kind+" "+offer.Version)
	}
	message := fmt.Sprintf("%s %s is not offered here; there are: %s", kind, version, strings.Join(known, ", "))
	return &NotTaken{codes.UnsupportedKind, message[:min(len(message), 1000)]}
}

// Leave gives a slot back: it is really free.
func (s *Slots) Leave(kind string) {
	s.occupied--
	s.byKind[kind]--
}

// Free is how many jobs may come now.
func (s *Slots) Free() int {
	if s.Draining {
		return 0
	}
	return s.slots - s.occupied
}

// Credit is how many jobs are allowed since the session began.
func (s *Slots) Credit() int64 { return s.received + int64(s.Free()) }
