package engine

import (
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/redact"
	"github.com/rara-run/rara/executors/go/internal/text"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// events makes an executor's events. Everything that users wrote is made valid, redacted and cut to size here.
type events struct {
	redactor *redact.Redactor
	id, name string
}

func (e *events) of(lease *rarav1.Lease) *rarav1.ProgressEvent {
	return &rarav1.ProgressEvent{Lease: lease, EventTime: timestamppb.Now()}
}

func (e *events) accepted(lease *rarav1.Lease) *rarav1.ProgressEvent {
	event := e.of(lease)
	event.Event = &rarav1.ProgressEvent_Accepted{
		Accepted: &rarav1.JobAccepted{ExecutorId: e.id, ExecutorName: e.name}}
	return event
}

func (e *events) running(lease *rarav1.Lease, runnerID string) *rarav1.ProgressEvent {
	event := e.of(lease)
	event.Event = &rarav1.ProgressEvent_Running{Running: &rarav1.JobRunning{RunnerId: runnerID}}
	return event
}

func (e *events) progress(
	lease *rarav1.Lease, report Report, artifacts []*rarav1.Artifact,
) *rarav1.ProgressEvent {
	event := e.of(lease)
	event.Event = &rarav1.ProgressEvent_Progress{Progress: &rarav1.JobProgress{
		Fraction:            report.Fraction,
		Message:             e.text(report.Message, text.MaxProgressBytes),
		Metrics:             e.metrics(report.Metrics),
		Checkpoint:          asItIs(report.Checkpoint),
		CheckpointArtifacts: artifacts,
	}}
	return event
}

func (e *events) effect(lease *rarav1.Lease, name string, result []byte) *rarav1.ProgressEvent {
	event := e.of(lease)
	event.Event = &rarav1.ProgressEvent_Effect{
		Effect: &rarav1.Effect{Name: name, Result: asItIs(result)}}
	return event
}

func (e *events) succeeded(lease *rarav1.Lease, output []byte, artifacts *jobArtifacts) *rarav1.ProgressEvent {
	result := &rarav1.JobResult{Output: e.payload(output)}
	manifest, consumed := artifacts.made()
	for _, artifact := range manifest {
		artifact.Metadata = e.payload(artifact.Metadata.GetData())
	}
	if len(manifest) > 0 {
		result.Manifest = &rarav1.ArtifactManifest{Artifacts: manifest}
	}
	result.Consumed = consumed
	event := e.of(lease)
	event.Event = &rarav1.ProgressEvent_Succeeded{Succeeded: result}
	return event
}

func (e *events) failed(lease *rarav1.Lease, failed *Failed) *rarav1.ProgressEvent {
	err := &rarav1.JobError{
		Code:       failed.Code,
		Message:    e.text(failed.Message, text.MaxMessageBytes),
		Retryable:  failed.Retryable,
		Details:    e.payload(failed.Details),
		StackTrace: text.CutMiddle(e.redactor.Text(text.Valid(failed.Stack)), text.MaxStackBytes),
		RunnerExit: failed.Exit,
	}
	if failed.Code == codes.FieldInvalid { // the handler would name the same thing in the same way again
		err.Retryable = new(false)
	}
	if failed.RetryAfter > 0 {
		err.RetryAfter = durationpb.New(failed.RetryAfter)
	}
	event := e.of(lease)
	event.Event = &rarav1.ProgressEvent_Failed{Failed: err}
	return event
}

// newest is the newest report that had a checkpoint; nil: none had.
func (e *events) cancelled(
	lease *rarav1.Lease, reason string, newest *rarav1.JobProgress, exit *rarav1.RunnerExit,
) *rarav1.ProgressEvent {
	event := e.of(lease)
	event.Event = &rarav1.ProgressEvent_Cancelled{Cancelled: &rarav1.JobCancelled{
		Reason: reason, RunnerExit: exit,
		Checkpoint: newest.GetCheckpoint(), CheckpointArtifacts: newest.GetCheckpointArtifacts()}}
	return event
}

func (e *events) metrics(given map[string]float64) map[string]float64 {
	metrics := make(map[string]float64, len(given))
	for name, value := range given {
		metrics[e.redactor.Text(name)] = value
	}
	return metrics
}

// text redacts before it cuts: half a secret at the end would not be found.
func (e *events) text(given string, limit int) string {
	return text.Cut(e.redactor.Text(text.Valid(given)), limit)
}

// asItIs is what the next attempt gets as it is: no secret is in it, see refuseSecret.
func asItIs(data []byte) *rarav1.Payload {
	if data == nil {
		return nil
	}
	return &rarav1.Payload{Data: data}
}

func (e *events) payload(data []byte) *rarav1.Payload {
	if data == nil {
		return nil
	}
	return &rarav1.Payload{Data: e.redactor.JSON(data)}
}
