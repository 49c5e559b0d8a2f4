// Package blobs moves blobs to and from ArtifactService, and keeps verified ones on the local disk.
package blobs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"os"
	"time"

	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rara-run/rara/executors/go/internal/codes"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const (
	chunkBytes   = 256 << 10
	unaryTimeout = 30 * time.Second
	idleTimeout  = 60 * time.Second // a transfer that moves nothing for so long is cut and tried again
	pingAfter    = 20 * time.Second
	pingTimeout  = 10 * time.Second
	firstBackoff = 200 * time.Millisecond
	maxBackoff   = 5 * time.Second
)

// DefaultPatience is how long a transfer may move nothing, whatever is the reason, before it is given up. The work of
// the job waits for as long; its lease goes on meanwhile.
const DefaultPatience = 5 * time.Minute

// Dial opens a connection for transfers alone. No heartbeat shows whether it is alive, so pings do while a call is under
// way: without, calls on a path that swallows everything would go there again and again. A scheduler takes offence at
// pings more often than each 10 s.
func Dial(target string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	pings := grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingAfter, Timeout: pingTimeout})
	return grpc.NewClient(target, append([]grpc.DialOption{pings}, options...)...)
}

// Client calls ArtifactService over a connection of its own: a large upload must not delay a heartbeat.
type Client struct {
	service  rarav1.ArtifactServiceClient
	patience time.Duration
}

// NewClient speaks over the connection.
func NewClient(connection grpc.ClientConnInterface, patience time.Duration) *Client {
	return &Client{rarav1.NewArtifactServiceClient(connection), patience}
}

// Download writes the blob to a file, verified.
func (c *Client) Download(ctx context.Context, digest *rarav1.Digest, target string) error {
	var got *rarav1.Digest
	for range 2 { // once, wrong bytes may be a fault of the way
		d := &download{expected: digest, target: target, hash: sha256.New()}
		err := c.again(ctx, func() error { return c.downloadOn(ctx, d) }, func() int64 { return d.size })
		if got = d.digest(); err != nil || proto.Equal(got, digest) {
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
	u := &upload{lease: lease, digest: digest, mediaType: mediaType, source: source}
	run := func() error {
		return c.again(ctx, func() error { return c.uploadOn(ctx, u) }, func() int64 { return u.sent })
	}
	err := run()
	var failure *codes.Failure
	if errors.As(err, &failure) && failure.Code == codes.ArtifactMismatch && u.resumedAt > 0 {
		return run() // what an earlier call had left was wrong, and was dropped: once more, from the beginning
	}
	return err
}

// download is a blob's bytes on their way into a file, over as many calls as it takes.
type download struct {
	expected *rarav1.Digest
	target   string
	hash     hash.Hash
	size     int64
}

func (d *download) digest() *rarav1.Digest {
	return &rarav1.Digest{Sha256: hex.EncodeToString(d.hash.Sum(nil)), SizeBytes: d.size}
}

// downloadOn goes on from where an earlier call was cut. Only what is written is counted, so that a full disk costs a
// pause and not the blob.
func (c *Client) downloadOn(ctx context.Context, d *download) error {
	ctx, moved, cancel := whileMoving(ctx)
	defer cancel()
	call, err := c.service.ReadBlob(ctx, &rarav1.ReadBlobRequest{Digest: d.expected, Offset: d.size})
	if err != nil {
		return err
	}
	flags := os.O_WRONLY | os.O_CREATE
	if d.size == 0 {
		flags |= os.O_TRUNC
	}
	file, err := os.OpenFile(d.target, flags, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	for d.size <= d.expected.SizeBytes { // beyond it is not the blob that was named, however long it goes on
		response, err := call.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		moved()
		if _, err := file.WriteAt(response.Data, d.size); err != nil {
			return err
		}
		d.hash.Write(response.Data)
		d.size += int64(len(response.Data))
	}
	return file.Close()
}

// upload is a file on its way to the service. resumedAt: what was stored when the last call began. sent: the furthest
// that any call came.
type upload struct {
	lease             *rarav1.Lease
	digest            *rarav1.Digest
	mediaType, source string
	resumedAt, sent   int64
}

func (c *Client) uploadOn(ctx context.Context, u *upload) error {
	uploadID, offset, err := c.beginUpload(ctx, u.lease, u.digest, u.mediaType)
	if err != nil || uploadID == "" {
		return err // or it is there
	}
	u.resumedAt = offset
	file, err := os.Open(u.source)
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := file.Seek(offset, io.SeekStart); err != nil {
		return err
	}
	verified, err := c.write(ctx, uploadID, file, u)
	if err == nil && !proto.Equal(verified, u.digest) {
		return &codes.Failure{Code: codes.ArtifactMismatch, Message: fmt.Sprintf(
			"blob %s: the store verified %q", u.digest.Sha256, verified.GetSha256())}
	}
	return err
}

// beginUpload returns the upload and where to go on: an earlier, cut call may have stored something, of this attempt or
// of one whose executor has died. An empty id: nothing is to be sent.
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

func (c *Client) write(ctx context.Context, uploadID string, source io.Reader, u *upload) (*rarav1.Digest, error) {
	ctx, moved, cancel := whileMoving(ctx)
	defer cancel()
	call, err := c.service.WriteBlob(ctx)
	if err != nil {
		return nil, err
	}
	offset := u.resumedAt
	buffer := make([]byte, chunkBytes)
	for finish := false; !finish; {
		count, err := io.ReadFull(source, buffer)
		finish = errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !finish {
			return nil, err
		}
		finish = finish || offset+int64(count) >= u.digest.SizeBytes
		request := &rarav1.WriteBlobRequest{UploadId: uploadID, Offset: offset, Data: buffer[:count], Finish: finish}
		if call.Send(request) != nil {
			break // CloseAndRecv tells why
		}
		moved()
		offset += int64(count)
		u.sent = max(u.sent, offset)
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

// again runs the attempt until it is done, fails for good, or nothing has moved for the patience.
func (c *Client) again(ctx context.Context, attempt func() error, moved func() int64) error {
	furthest, since := int64(0), time.Now()
	for number := 0; ; number = min(number+1, 16) {
		err := attempt()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		what := faultOf(err)
		if what.isFinal {
			return what.failure
		}
		if moved() > furthest {
			furthest, since, number = moved(), time.Now(), 0
		}
		pause := what.retryAfter
		if pause == 0 {
			pause = time.Duration(rand.Float64() * float64(min(maxBackoff, firstBackoff<<number)))
		}
		if time.Since(since)+pause > c.patience {
			return what.failure
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
