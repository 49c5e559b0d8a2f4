// Package beats keeps the heartbeats of one session: numbers, what was renewed since when, silence, readiness.
//
// It is pure: times come in, on the lease clock.
package beats

import (
	"slices"
	"time"

	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// The database may be away for long; older heartbeats prove nothing any more.
const maxUnrenewed = 1000

type beat struct {
	number int64
	sentAt time.Duration
	tokens []int64
}

// Renewal names the leases that the heartbeat sent at SentAt has renewed.
type Renewal struct {
	SentAt time.Duration
	Tokens []int64
}

// Heartbeats of one session.
type Heartbeats struct {
	Interval time.Duration
	silence  time.Duration

	heardAt        time.Duration
	number         int64
	answered       int64
	answeredSentAt time.Duration
	beats          []beat
}

// New begins with Welcome, which has just come and answers Hello.
func New(interval, silence, now time.Duration) *Heartbeats {
	return &Heartbeats{Interval: interval, silence: silence, heardAt: now, answeredSentAt: now}
}

// Compose makes the next heartbeat, sent now.
func (h *Heartbeats) Compose(tokens []int64, now time.Duration) *rarav1.Heartbeat {
	slices.Sort(tokens)
	h.number++
	h.beats = append(h.beats, beat{h.number, now, tokens})
	if len(h.beats) > maxUnrenewed {
		h.beats = h.beats[1:]
	}
	return &rarav1.Heartbeat{Number: h.number, LeaseTokens: tokens, Answered: h.answered}
}

// Answer takes an answer in, and returns what it renewed, if anything new.
func (h *Heartbeats) Answer(ack *rarav1.HeartbeatAck) (Renewal, bool) {
	if ack.Number > h.answered && ack.Number <= h.number {
		h.answered = ack.Number
		for _, beat := range h.beats {
			if beat.number == ack.Number {
				h.answeredSentAt = beat.sentAt
			}
		}
	}
	var renewed *beat
	for len(h.beats) > 0 && h.beats[0].number <= ack.Renewed {
		renewed, h.beats = &h.beats[0], h.beats[1:]
	}
	if renewed == nil || renewed.number != ack.Renewed {
		return Renewal{}, false
	}
	return Renewal{renewed.sentAt, renewed.tokens}, true
}

// Heard takes in that a frame came: any shows that the other side lives.
func (h *Heartbeats) Heard(now time.Duration) { h.heardAt = now }

// IsSilent tells whether nothing came for the silence timeout.
func (h *Heartbeats) IsSilent(now time.Duration) bool { return now-h.heardAt > h.silence }

// IsReady tells whether both directions have proved themselves within two intervals.
func (h *Heartbeats) IsReady(now time.Duration) bool { return now-h.answeredSentAt <= 2*h.Interval }
