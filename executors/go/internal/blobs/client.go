// Package blobs moves blobs to and from ArtifactService, and keeps verified ones on the local disk.
package blobs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"time"

	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rara-run/rara/executors/go/internal/codes"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const (
	chunkBytes   = 256 << 10
	unaryTimeout = 30 * time.Second
	idleTimeout  = 60 * time.Second // a transfer that moves nothing for so long is cut and tried again
	attempts     = 6
	firstBackoff = 200 * time.Millisecond
	maxBackoff   = 5 * time.Second
)

// Client calls ArtifactService over a connection of its own: a large upload must not delay a heartbeat.
type Client struct{ service rarav1.ArtifactServiceClient }

// NewClient speaks over the connection.
func NewClient(connection grpc.ClientConnInterface) *Client {
	return &Client{rarav1.NewArtifactServiceClient(connection)}
}

// Download writes the blob to a file, verified.
func (c *Client) Download(ctx context.Context, digest *rarav1.Digest, target string) error {
	var got *rarav1.Digest
	for range 2 { // once, wrong bytes may be a fault of the way
		err := again(ctx, func() (err error) {
			got, err = c.downloadOnce(ctx, digest, target)
			return err
		})
		if err != nil || proto.Equal(got, digest) {
			return err
		}
	}
	return &codes.Failure{Code: codes.ArtifactMismatch, Message: fmt.Sprintf(
		"blob %s: %d bytes were named, %d with digest %s came", digest.Sha256, digest.SizeBytes, got.SizeBytes, got.Sha256)}
}

// Upload stores the file's bytes under the digest, unless they are there.
func (c *Client) Upload(
	ctx context.Context, lease *rarav1.Lease, digest *rarav1.Digest, mediaType, source string,
) error {
	return again(ctx, func() error { return c.uploadOnce(ctx, lease, digest, mediaType, source) })
}

func (c *Client) downloadOnce(ctx context.Context, digest *rarav1.Digest, target string) (*rarav1.Digest, error) {
	ctx, moved, cancel := whileMoving(ctx)
	defer cancel()
	call, err := c.service.ReadBlob(ctx, &rarav1.ReadBlobRequest{Digest: digest})
	if err != nil {
		return nil, err
	}
	file, err := os.Create(target)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	hash, size := sha256.New(), int64(0)
	for size <= digest.SizeBytes { // beyond it is not the blob that was named, however long it goes on
		response, err := call.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		moved()
		hash.Write(response.Data)
		size += int64(len(response.Data))
		if _, err := file.Write(response.Data); err != nil {
			return nil, err
		}
	}
	return &rarav1.Digest{Sha256: hex.EncodeToString(hash.Sum(nil)), SizeBytes: size}, file.Close()
}

func (c *Client) uploadOnce(
	ctx context.Context, lease *rarav1.Lease, digest *rarav1.Digest, mediaType, source string,
) error {
	uploadID, offset, err := c.beginUpload(ctx, lease, digest, mediaType)
	if err != nil || uploadID == "" {
		return err // or it is there
	}
	file, err := os.Open(source)
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := file.Seek(offset, io.SeekStart); err != nil {
		return err
	}
	verified, err := c.write(ctx, uploadID, file, offset)
	if err == nil && !proto.Equal(verified, digest) {
		return &codes.Failure{Code: codes.ArtifactMismatch, Message: fmt.Sprintf(
			"blob %s: the store verified %q", digest.Sha256, verified.GetSha256())}
	}
	return err
}

// beginUpload returns the upload and where to go on: an earlier, cut attempt may have stored something. An empty id:
// nothing is to be sent.
func (c *Client) beginUpload(
	ctx context.Context, lease *rarav1.Lease, digest *rarav1.Digest, mediaType string,
) (string, int64, error) {
	ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
	defer cancel()
	created, err := c.service.CreateUpload(
		ctx, &rarav1.CreateUploadRequest{Lease: lease, Digest: digest, MediaType: mediaType})
	if err != nil || created.UploadId == "" {
		return "", 0, err
	}
	if len(created.Parts) > 0 {
		return "", 0, &codes.Failure{Code: codes.DependencyUnavailable,
			Message: "the blob store asks for presigned parts, which this SDK lacks"}
	}
	stored, err := c.service.QueryWriteStatus(ctx, &rarav1.QueryWriteStatusRequest{UploadId: created.UploadId})
	switch status.Code(err) {
	case grpccodes.OK:
		return created.UploadId, stored.CommittedBytes, nil
	case grpccodes.Unimplemented, grpccodes.NotFound:
		return created.UploadId, 0, nil
	default:
		return "", 0, err
	}
}

func (c *Client) write(ctx context.Context, uploadID string, source io.Reader, offset int64) (*rarav1.Digest, error) {
	ctx, moved, cancel := whileMoving(ctx)
	defer cancel()
	call, err := c.service.WriteBlob(ctx)
	if err != nil {
		return nil, err
	}
	buffer := make([]byte, chunkBytes)
	for finish := false; !finish; {
		count, err := io.ReadFull(source, buffer)
		finish = errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !finish {
			return nil, err
		}
		request := &rarav1.WriteBlobRequest{UploadId: uploadID, Offset: offset, Data: buffer[:count], Finish: finish}
		if call.Send(request) != nil {
			break // CloseAndRecv tells why
		}
		moved()
		offset += int64(count)
	}
	response, err := call.CloseAndRecv()
	return response.GetVerified(), err
}

// whileMoving ends a call that nothing moves on for idleTimeout; moved says that something did.
func whileMoving(ctx context.Context) (_ context.Context, moved func(), cancel func()) {
	ctx, stop := context.WithCancelCause(ctx)
	timer := time.AfterFunc(idleTimeout, func() { stop(errIdle) })
	return ctx, func() { timer.Reset(idleTimeout) }, func() { timer.Stop(); stop(nil) }
}

var errIdle = errors.New("the transfer stood still")

// again runs the attempt, and runs it again while the service is away.
func again(ctx context.Context, attempt func() error) error {
	var err error
	for number := range attempts {
		if err = attempt(); err == nil || ctx.Err() != nil || !isAway(err) {
			break
		}
		pause := time.Duration(rand.Float64() * float64(min(maxBackoff, firstBackoff<<number)))
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return failure(err)
}

func isAway(err error) bool {
	switch status.Code(err) {
	case grpccodes.Unavailable, grpccodes.DeadlineExceeded, grpccodes.Aborted, grpccodes.Canceled:
		return true // our own cancel was looked at before
	}
	return false
}

// failure is a call's error as the contract's code for it.
func failure(err error) error {
	answer, ok := status.FromError(err)
	if err == nil || !ok {
		return err
	}
	switch answer.Code() {
	case grpccodes.NotFound:
		return &codes.Failure{Code: codes.ArtifactMissing, Message: "the artifact is gone: " + answer.Message()}
	case grpccodes.InvalidArgument:
		return &codes.Failure{Code: codes.ArtifactMismatch,
			Message: "the artifact service refused the blob: " + answer.Message()}
	case grpccodes.FailedPrecondition:
		return &codes.Failure{Code: codes.LeaseLost, Message: "the lease is not current: " + answer.Message()}
	}
	if isAway(err) {
		return &codes.Failure{Code: codes.DependencyUnavailable,
			Message: "the artifact service is away: " + answer.Message()}
	}
	return &codes.Failure{Code: codes.Internal, Message: fmt.Sprintf(
		"the artifact service failed with %v: %s", answer.Code(), answer.Message())}
}
