package scripted

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"strconv"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// Blobs is an artifact service in memory.
type Blobs struct {
	rarav1.UnimplementedArtifactServiceServer

	mu      sync.Mutex
	stored  map[string][]byte
	uploads map[string]*upload
	// CutAfter ends the next WriteBlob call when so many bytes are stored, if above 0.
	cutAfter int
	// cutReads ends the next reads at these offsets, one each.
	cutReads []int
	offsets  []int64
	refusals []error
	// Calls counts finished uploads and reads.
	Writes, Reads int
}

type upload struct {
	digest *rarav1.Digest
	data   []byte
}

func newBlobs() *Blobs { return &Blobs{stored: map[string][]byte{}, uploads: map[string]*upload{}} }

// Put stores bytes under their digest.
func (b *Blobs) Put(data []byte) *rarav1.Digest {
	digest := DigestOf(data)
	b.PutAs(digest, data)
	return digest
}

// PutAs stores bytes under another digest than theirs.
func (b *Blobs) PutAs(digest *rarav1.Digest, data []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stored[digest.Sha256] = data
}

// Get returns stored bytes; nil: there are none.
func (b *Blobs) Get(digest *rarav1.Digest) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.stored[digest.Sha256]
}

// Lose forgets a blob.
func (b *Blobs) Lose(digest *rarav1.Digest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.stored, digest.Sha256)
}

// CutAfter ends the next write when so many bytes are stored.
func (b *Blobs) CutAfter(size int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cutAfter = size
}

// CutReadsAfter ends the next reads when they have come to these offsets.
func (b *Blobs) CutReadsAfter(offsets ...int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cutReads = offsets
}

// Offsets at which reads began.
func (b *Blobs) Offsets() []int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.offsets
}

// Refuse ends the next calls of CreateUpload with these errors.
func (b *Blobs) Refuse(errs ...error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refusals = errs
}

// LeaveBehind is an upload that somebody has begun with these bytes.
func (b *Blobs) LeaveBehind(request *rarav1.CreateUploadRequest, data []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.uploads[uploadID(request)] = &upload{digest: request.Digest, data: data}
}

func uploadID(request *rarav1.CreateUploadRequest) string {
	return request.Digest.Sha256[:16] + "-" + strconv.FormatInt(request.Lease.GetLeaseToken(), 10)
}

// Counts of finished writes and begun reads.
func (b *Blobs) Counts() (writes, reads int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Writes, b.Reads
}

// DigestOf is the digest of bytes.
func DigestOf(data []byte) *rarav1.Digest {
	hash := sha256.Sum256(data)
	return &rarav1.Digest{Sha256: hex.EncodeToString(hash[:]), SizeBytes: int64(len(data))}
}

// CreateUpload is the service's method, as are the next.
func (b *Blobs) CreateUpload(
	_ context.Context, request *rarav1.CreateUploadRequest,
) (*rarav1.CreateUploadResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.refusals) > 0 {
		err := b.refusals[0]
		b.refusals = b.refusals[1:]
		return nil, err
	}
	if b.stored[request.Digest.Sha256] != nil {
		return &rarav1.CreateUploadResponse{}, nil
	}
	id := uploadID(request)
	if b.uploads[id] == nil {
		b.uploads[id] = &upload{digest: request.Digest}
	}
	return &rarav1.CreateUploadResponse{UploadId: id}, nil
}

func (b *Blobs) QueryWriteStatus(
	_ context.Context, request *rarav1.QueryWriteStatusRequest,
) (*rarav1.QueryWriteStatusResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &rarav1.QueryWriteStatusResponse{CommittedBytes: int64(len(b.uploads[request.UploadId].data))}, nil
}

func (b *Blobs) WriteBlob(stream rarav1.ArtifactService_WriteBlobServer) error {
	var to *upload
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&rarav1.WriteBlobResponse{})
		}
		if err != nil {
			return err
		}
		verified, err := b.write(&to, request)
		if err != nil {
			return err
		}
		if verified != nil {
			return stream.SendAndClose(&rarav1.WriteBlobResponse{
				CommittedBytes: verified.SizeBytes, Verified: verified})
		}
	}
}

func (b *Blobs) write(to **upload, request *rarav1.WriteBlobRequest) (*rarav1.Digest, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if *to == nil {
		*to = b.uploads[request.UploadId]
	}
	u := *to
	if request.Offset != int64(len(u.data)) {
		return nil, status.Errorf(codes.InvalidArgument, "offset %d, stored %d", request.Offset, len(u.data))
	}
	u.data = append(u.data, request.Data...)
	if b.cutAfter > 0 && len(u.data) >= b.cutAfter {
		b.cutAfter = 0
		return nil, status.Error(codes.Unavailable, "cut")
	}
	if !request.Finish {
		return nil, nil
	}
	digest := DigestOf(u.data)
	if digest.Sha256 != u.digest.Sha256 {
		u.data = nil // dropped
		return nil, status.Error(codes.InvalidArgument, "not the digest")
	}
	b.stored[digest.Sha256] = u.data
	b.Writes++
	return digest, nil
}

func (b *Blobs) ReadBlob(request *rarav1.ReadBlobRequest, stream rarav1.ArtifactService_ReadBlobServer) error {
	b.mu.Lock()
	data, ok := b.stored[request.Digest.Sha256]
	b.Reads++
	b.offsets = append(b.offsets, request.Offset)
	end := len(data)
	if len(b.cutReads) > 0 {
		end = b.cutReads[0]
		b.cutReads = b.cutReads[1:]
	}
	b.mu.Unlock()
	if !ok {
		return status.Error(codes.NotFound, "no such blob")
	}
	isCut := end < len(data)
	data = data[request.Offset:end]
	for len(data) > 0 {
		size := min(len(data), 100_000)
		if err := stream.Send(&rarav1.ReadBlobResponse{Data: data[:size]}); err != nil {
			return err
		}
		data = data[size:]
	}
	if isCut {
		return status.Error(codes.Unavailable, "cut")
	}
	return nil
}
