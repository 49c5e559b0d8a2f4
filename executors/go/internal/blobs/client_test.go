package blobs_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/rara-run/rara/executors/go/internal/blobs"
	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/scripted"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

func client(t *testing.T, patience time.Duration) (*blobs.Client, *scripted.Blobs) {
	t.Helper()
	scheduler := scripted.Start(t)
	connection, err := grpc.NewClient(scheduler.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	return blobs.NewClient(connection, patience), scheduler.Blobs
}

// refusal is a status as the scheduler sends it.
func refusal(code grpccodes.Code, reason string, wait time.Duration, metadata map[string]string) error {
	details := []protoadapt.MessageV1{
		&errdetails.ErrorInfo{Domain: "rara.v1", Reason: reason, Metadata: metadata}}
	if wait > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(wait)})
	}
	answer, err := status.New(code, "as scripted").WithDetails(details...)
	if err != nil {
		panic(err)
	}
	return answer.Err()
}

func data() []byte { return bytes.Repeat([]byte("0123456789abcdef"), 60_000) }

func fileOf(t *testing.T, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "source")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func codeOf(err error) string {
	var failure *codes.Failure
	if errors.As(err, &failure) {
		return failure.Code
	}
	return ""
}

func TestADownloadGoesOnWhereItWasCut(t *testing.T) {
	t.Parallel()
	client, service := client(t, time.Minute)
	digest := service.Put(data())
	service.CutReadsAfter(300_000, 600_000)
	target := filepath.Join(t.TempDir(), "target")
	if err := client.Download(context.Background(), digest, target); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(target); !bytes.Equal(got, data()) {
		t.Errorf("%d bytes are not the blob's", len(got))
	}
	if offsets := service.Offsets(); len(offsets) != 3 || offsets[0] != 0 || offsets[1] < 300_000 || offsets[2] < 600_000 {
		t.Errorf("reads began at %v", offsets)
	}
}

func TestAnUploadWaitsForTheServiceAndGoesOn(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]error{
		"busy":    refusal(grpccodes.ResourceExhausted, "QUEUE_FULL", time.Millisecond, nil),
		"full":    refusal(grpccodes.ResourceExhausted, "QUOTA_EXCEEDED", time.Millisecond, nil),
		"expired": refusal(grpccodes.NotFound, "UPLOAD_NOT_FOUND", 0, nil),
		"beaten":  refusal(grpccodes.InvalidArgument, "FIELD_INVALID", 0, map[string]string{"committed_bytes": "7"}),
		"reset":   status.Error(grpccodes.Internal, "a reset connection"),
		"away":    status.Error(grpccodes.Unavailable, "nobody is there"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, service := client(t, time.Minute)
			digest := scripted.DigestOf(data())
			service.CutAfter(400_000)
			service.Refuse(fault)
			if err := client.Upload(context.Background(), nil, digest, "", fileOf(t, data())); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(service.Get(digest), data()) {
				t.Error("the blob is not there")
			}
		})
	}
}

func TestWhatIsFinalIsToldAtOnceAndByItsCode(t *testing.T) {
	t.Parallel()
	for reason, want := range map[string]struct {
		status grpccodes.Code
		code   string
	}{
		"ARTIFACT_TOO_LARGE": {grpccodes.InvalidArgument, codes.ArtifactTooLarge},
		"FIELD_INVALID":      {grpccodes.InvalidArgument, codes.ArtifactMismatch},
		"ARTIFACT_MISMATCH":  {grpccodes.InvalidArgument, codes.ArtifactMismatch},
		"LEASE_LOST":         {grpccodes.FailedPrecondition, codes.LeaseLost},
		"INTERNAL":           {grpccodes.Internal, codes.Internal},
		"NOT_ALLOWED":        {grpccodes.PermissionDenied, codes.Internal},
	} {
		client, service := client(t, time.Hour)
		service.Refuse(refusal(want.status, reason, 0, nil))
		err := client.Upload(context.Background(), nil, scripted.DigestOf(data()), "", fileOf(t, data()))
		if codeOf(err) != want.code {
			t.Errorf("%s: %v", reason, err)
		}
	}
}

func TestPatienceEndsWithTheLastCause(t *testing.T) {
	t.Parallel()
	for reason, want := range map[string]string{
		"QUOTA_EXCEEDED": codes.QuotaExceeded, "QUEUE_FULL": codes.DependencyUnavailable,
	} {
		client, service := client(t, 50*time.Millisecond)
		full := refusal(grpccodes.ResourceExhausted, reason, time.Minute, nil)
		service.Refuse(full, full)
		err := client.Upload(context.Background(), nil, scripted.DigestOf(data()), "", fileOf(t, data()))
		if codeOf(err) != want {
			t.Errorf("%s: %v", reason, err)
		}
	}
}

func TestWrongBytesThatWereLeftBehindCostOneMoreUpload(t *testing.T) {
	t.Parallel()
	client, service := client(t, time.Minute)
	digest := scripted.DigestOf(data())
	service.LeaveBehind(&rarav1.CreateUploadRequest{Digest: digest}, bytes.Repeat([]byte("x"), 100_000))
	if err := client.Upload(context.Background(), nil, digest, "", fileOf(t, data())); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(service.Get(digest), data()) {
		t.Error("the blob is not there")
	}
}

func TestAFullDiskIsWaitedForAndNamed(t *testing.T) {
	t.Parallel()
	client, service := client(t, 50*time.Millisecond)
	digest := service.Put(data())
	err := client.Download(context.Background(), digest, "/dev/full")
	if codeOf(err) != codes.DependencyUnavailable {
		t.Errorf("%v", err)
	}
	if _, reads := service.Counts(); reads < 1 {
		t.Error("nothing was read")
	}
}
