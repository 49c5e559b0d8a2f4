package blobs

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

// fault is what a failed call means for a transfer. failure: how the attempt ends if it is not tried again. retryAfter:
// no sooner than this; 0: nobody said.
type fault struct {
	failure    error
	isFinal    bool
	retryAfter time.Duration
}

func faultOf(err error) fault {
	var known *codes.Failure
	if errors.As(err, &known) {
		return fault{failure: err, isFinal: true}
	}
	if isFull(err) {
		return fault{failure: &codes.Failure{Code: codes.DependencyUnavailable,
			Message: "the executor's disk is full (RARA_EXECUTOR_DIR): " + err.Error()}}
	}
	answer, ok := status.FromError(err)
	if !ok {
		return fault{failure: err, isFinal: true}
	}
	return faultOfStatus(answer)
}

func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EFBIG)
}

func faultOfStatus(answer *status.Status) fault {
	info, retryAfter := details(answer)
	said := answer.Message()
	final := func(code, text string) fault {
		return fault{failure: &codes.Failure{Code: code, Message: text}, isFinal: true}
	}
	away := func(text string) fault {
		return fault{failure: &codes.Failure{Code: codes.DependencyUnavailable, Message: text}, retryAfter: retryAfter}
	}
	switch info.GetReason() {
	case codes.QuotaExceeded:
		return fault{failure: &codes.Failure{Code: codes.QuotaExceeded, Message: said}, retryAfter: retryAfter}
	case codes.ArtifactTooLarge:
		return final(codes.ArtifactTooLarge, said)
	case "QUEUE_FULL", "RATE_LIMITED":
		return away("the artifact service is busy: " + said)
	case "UPLOAD_NOT_FOUND":
		return away("the upload is gone: " + said) // begin another one
	case codes.FieldInvalid:
		if _, isOffset := info.Metadata["committed_bytes"]; isOffset {
			return away("another call has written to the upload: " + said)
		}
	}
	if isAway(answer.Code(), info != nil) {
		return away("the artifact service is away: " + said)
	}
	switch answer.Code() {
	case grpccodes.NotFound:
		return final(codes.ArtifactMissing, "the artifact is gone: "+said)
	case grpccodes.InvalidArgument:
		return final(codes.ArtifactMismatch, "the artifact service refused the blob: "+said)
	case grpccodes.FailedPrecondition:
		return final(codes.LeaseLost, "the lease is not current: "+said)
	}
	return final(codes.Internal, fmt.Sprintf("the artifact service failed with %v: %s", answer.Code(), said))
}

// isAway tells a service that cannot answer now. Where nobody on the other side said anything a broken connection may
// look like one of several, depending on where it hit; our own cancel was looked at before.
func isAway(code grpccodes.Code, isOurs bool) bool {
	switch code {
	case grpccodes.Unavailable, grpccodes.DeadlineExceeded, grpccodes.Aborted:
		return true
	case grpccodes.Canceled, grpccodes.Internal, grpccodes.Unknown:
		return !isOurs
	}
	return false
}

// details of a status: nil where none is ours.
func details(answer *status.Status) (info *errdetails.ErrorInfo, retryAfter time.Duration) {
	for _, detail := range answer.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == "rara.v1" {
				info = detail
			}
		case *errdetails.RetryInfo:
			retryAfter = detail.RetryDelay.AsDuration()
		}
	}
	return info, retryAfter
}
