package engine

import (
	"time"

	"github.com/rara-run/rara/executors/go/internal/beats"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// What a session begins with, and what the scheduler says in it, turned into what the supervisor does. All of it is
// called with the mutex.

func (s *Supervisor) hello(version uint32) *rarav1.Hello {
	hello := &rarav1.Hello{
		ProtocolVersion: version,
		ExecutorId:      s.config.ExecutorID,
		ExecutorName:    s.config.ExecutorName,
		ExecutorKind:    s.config.ExecutorKind,
		Sdk:             s.config.SDK,
		Capabilities:    capabilities(s.config.Operations),
		Labels:          s.config.Labels,
	}
	for token, job := range s.jobs {
		if job.isLost() {
			continue
		}
		last, acked := s.outbox.Sequences(token)
		hello.HeldJobs = append(hello.HeldJobs, &rarav1.HeldJob{
			Lease: job.lease(), LastSequence: last, AckedSequence: acked, Finished: job.phase == ended})
	}
	return hello
}

// capabilities are one for each kind, with all its versions. A kind has a bound if each of its versions has one.
func capabilities(operations []Operation) []*rarav1.Capability {
	var all []*rarav1.Capability
	known := map[string]*rarav1.Capability{}
	for _, operation := range operations {
		bound := int32(operation.MaxConcurrency)
		capability := known[operation.Kind]
		if capability == nil {
			capability = &rarav1.Capability{Kind: operation.Kind, MaxConcurrency: bound}
			known[operation.Kind] = capability
			all = append(all, capability)
		}
		capability.Versions = append(capability.Versions, operation.Version)
		if bound == 0 || capability.MaxConcurrency == 0 {
			capability.MaxConcurrency = 0
		} else {
			capability.MaxConcurrency = max(capability.MaxConcurrency, bound)
		}
	}
	return all
}

func (s *Supervisor) welcomed(session *session, welcome *rarav1.Welcome) {
	s.session = session
	s.slots.NewSession()
	if s.slots.Draining {
		session.drain(nil)
	}
	s.takeLimits(welcome.Terms.GetLimits())
	// The answer names every held token: what it does not name is not ours any more.
	lost := map[int64]bool{}
	for token := range s.jobs {
		lost[token] = true
	}
	for _, ack := range welcome.Acks.GetAcks() {
		delete(lost, ack.LeaseToken)
	}
	for _, refusal := range welcome.Acks.GetRefusals() {
		delete(lost, refusal.LeaseToken)
	}
	for _, cancel := range welcome.Cancels {
		delete(lost, cancel.LeaseToken)
	}
	for _, token := range welcome.LostLeaseTokens {
		lost[token] = true
	}
	for token := range lost {
		s.lose(token)
	}
	s.acks(welcome.Acks)
	for _, cancel := range welcome.Cancels {
		s.cancel(cancel)
	}
	s.afterChange()
	s.connected()
}

// connected tells, once, that a scheduler is there.
func (s *Supervisor) connected() {
	if s.config.OnConnected != nil {
		s.spawn(s.config.OnConnected)
		s.config.OnConnected = nil
	}
}

// takeLimits keeps what the scheduler leaves out as it is.
func (s *Supervisor) takeLimits(limits *rarav1.Limits) {
	for _, limit := range []struct {
		given int32
		own   *int
	}{
		{limits.GetMaxPayloadBytes(), &s.maxPayloadBytes},
		{limits.GetMaxInlineBytes(), &s.maxInlineBytes},
		{limits.GetMaxFrameBytes(), &s.maxFrameBytes},
		{limits.GetEventWindow(), &s.outbox.EventWindow},
	} {
		if limit.given > 0 {
			*limit.own = int(limit.given)
		}
	}
}

func (s *Supervisor) acks(acks *rarav1.EventAcks) {
	for _, ack := range acks.GetAcks() {
		s.acknowledged(ack)
	}
	for _, refusal := range acks.GetRefusals() {
		s.refused(refusal)
	}
}

func (s *Supervisor) heartbeatAck(ack *rarav1.HeartbeatAck, renewal beats.Renewal) {
	for _, token := range ack.LostLeaseTokens {
		s.lose(token)
	}
	for _, token := range renewal.Tokens {
		s.renewed(token, renewal.SentAt)
	}
	for _, cancel := range ack.Cancels {
		s.cancel(cancel)
	}
}

// heartbeatTokens are handlers that run or start, and finished jobs with unacknowledged events.
func (s *Supervisor) heartbeatTokens() []int64 {
	var tokens []int64
	for token, job := range s.jobs {
		if job.phase != accepting && !job.isLost() {
			tokens = append(tokens, token)
		}
	}
	return tokens
}

func (s *Supervisor) askedToDrain(drain *rarav1.Drain) {
	if drain.FinishWithin == nil {
		s.drain.asked(nil)
		return
	}
	within := drain.FinishWithin.AsDuration()
	s.drain.asked(&within)
}

// beginDrain asks for no more jobs, and refuses those that still come.
func (s *Supervisor) beginDrain(finishWithin *time.Duration) {
	s.slots.Draining = true
	if s.session != nil {
		s.session.drain(finishWithin)
	}
}
