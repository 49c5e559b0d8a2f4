// Package s3sink replaces objects of S3-compatible stores by compare-and-swap, so that a superseded attempt loses.
//
// What changes is a small pointer, the object at the path itself: JSON with the token, and the key, digest and size of
// the bytes, which are an object of their own under a name that nobody else uses. The token stands in what the store
// compares by ETag, so that equal bytes of two attempts are two pointers. A bare object could not be fenced: its ETag
// says nothing of the token.
package s3sink

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"

	"github.com/minio/minio-go/v7"

	"github.com/rara-run/rara/executors/go/rara"
	"github.com/rara-run/rara/executors/go/rara/sinks"
)

const (
	attempts        = 32 // each lost swap means that somebody else's has been made
	maxPointerBytes = 16 << 10
)

// Pointer says where the bytes are, and who wrote them.
type Pointer struct {
	LeaseToken int64  `json:"lease_token"`
	Object     string `json:"object"`
	SHA256     string `json:"sha256"`
	SizeBytes  int64  `json:"size_bytes"`
}

// Store is a bucket of a store with conditional writes; Check tells whether it has them.
type Store struct {
	Client *minio.Client
	Bucket string
}

// Put makes path point to what content gives, from its beginning, unless a newer attempt has written it: then the error
// is sinks.ErrSuperseded. Bytes that lost, and those of earlier pointers, stay beside it under path.TOKEN-DIGEST, for a
// lifecycle rule to remove.
func (s *Store) Put(ctx context.Context, token int64, path string, content io.ReadSeeker) (*Pointer, error) {
	if err := sinks.CheckToken(token); err != nil {
		return nil, err
	}
	found, etag, err := s.look(ctx, path)
	if err != nil {
		return nil, err
	}
	if found != nil && found.LeaseToken > token { // before bytes that nobody would see are sent
		return nil, sinks.Superseded("object "+path, token)
	}
	pointer, err := s.store(ctx, token, path, content)
	if err != nil {
		return nil, err
	}
	for range attempts {
		done, err := s.swap(ctx, path, pointer, etag)
		if err != nil || done {
			return pointer, err
		}
		if found, etag, err = s.look(ctx, path); err != nil {
			return nil, err
		}
		if found != nil && found.LeaseToken > token {
			return nil, sinks.Superseded("object "+path, token)
		}
	}
	return nil, rara.Retryable("WRITE_CONTENDED", "object %s: %d others were faster", path, attempts)
}

// store the bytes under a name of their own.
func (s *Store) store(ctx context.Context, token int64, path string, content io.ReadSeeker) (*Pointer, error) {
	hash := sha256.New()
	size, err := io.Copy(hash, content)
	if err != nil {
		return nil, err
	}
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	digest := hex.EncodeToString(hash.Sum(nil))
	pointer := &Pointer{token, fmt.Sprintf("%s.%d-%s", path, token, digest), digest, size}
	_, err = s.Client.PutObject(ctx, s.Bucket, pointer.Object, content, size, minio.PutObjectOptions{})
	if err != nil {
		return nil, fmt.Errorf("object %s: %w", pointer.Object, err)
	}
	return pointer, nil
}

// Pointer is where path points to now; nil: nowhere.
func (s *Store) Pointer(ctx context.Context, path string) (*Pointer, error) {
	pointer, _, err := s.look(ctx, path)
	return pointer, err
}

// Get returns the bytes that path points to, verified. os.ErrNotExist: there are none.
func (s *Store) Get(ctx context.Context, path string) ([]byte, error) {
	pointer, err := s.Pointer(ctx, path)
	if err != nil {
		return nil, err
	}
	if pointer == nil {
		return nil, fmt.Errorf("object %s: %w", path, os.ErrNotExist)
	}
	data, _, err := s.read(ctx, pointer.Object, pointer.SizeBytes)
	if err != nil {
		return nil, err
	}
	if hash := sha256.Sum256(data); hex.EncodeToString(hash[:]) != pointer.SHA256 {
		return nil, rara.Retryable("OBJECT_MISMATCH", "object %s does not have its digest", pointer.Object)
	}
	return data, nil
}

// Check tries whether the store keeps its word, with an object at path: some write whatever the condition says.
func (s *Store) Check(ctx context.Context, path string) (err error) {
	defer func() {
		err = errors.Join(err, s.Client.RemoveObject(ctx, s.Bucket, path, minio.RemoveObjectOptions{}))
	}()
	for token, step := range []struct {
		etag func(current string) string
		want bool
	}{
		{func(string) string { return "" }, true},
		{func(string) string { return "" }, false},
		{func(string) string { return "of nothing" }, false},
		{func(current string) string { return current }, true},
	} {
		_, current, err := s.look(ctx, path)
		if err != nil {
			return err
		}
		done, err := s.swap(ctx, path, &Pointer{LeaseToken: int64(token + 1), Object: path}, step.etag(current))
		if err != nil {
			return err
		}
		if done != step.want {
			return rara.Terminal("STORE_NOT_CONDITIONAL", "the store writes whatever the condition says")
		}
	}
	return nil
}

// look returns the pointer and its ETag; nil: there is none.
func (s *Store) look(ctx context.Context, path string) (*Pointer, string, error) {
	data, etag, err := s.read(ctx, path, maxPointerBytes)
	if errors.Is(err, os.ErrNotExist) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	pointer := &Pointer{}
	if err := json.Unmarshal(data, pointer); err != nil || pointer.Object == "" {
		return nil, "", rara.Terminal("POINTER_INVALID", "object %s was not written by Put", path)
	}
	return pointer, etag, nil
}

// swap writes the pointer if the object still has this ETag; empty: if there is none.
func (s *Store) swap(ctx context.Context, path string, pointer *Pointer, etag string) (bool, error) {
	var data bytes.Buffer
	encoder := json.NewEncoder(&data)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(pointer); err != nil {
		return false, err
	}
	text := bytes.TrimSuffix(data.Bytes(), []byte("\n")) // the same text in every language
	options := minio.PutObjectOptions{DisableMultipart: true, ContentType: "application/json"}
	if etag == "" {
		options.SetMatchETagExcept("*")
	} else {
		options.SetMatchETag(etag)
	}
	_, err := s.Client.PutObject(ctx, s.Bucket, path, bytes.NewReader(text), int64(len(text)), options)
	switch minio.ToErrorResponse(err).StatusCode {
	case http.StatusPreconditionFailed, http.StatusConflict, http.StatusNotFound:
		return false, nil
	case http.StatusNotImplemented:
		return false, rara.Terminal("STORE_NOT_CONDITIONAL", "the store cannot replace an object under a condition: %w", err)
	}
	if err != nil {
		return false, fmt.Errorf("object %s: %w", path, err)
	}
	return true, nil
}

// read an object of at most so many bytes.
func (s *Store) read(ctx context.Context, key string, limit int64) ([]byte, string, error) {
	body, info, _, err := minio.Core{Client: s.Client}.GetObject(ctx, s.Bucket, key, minio.GetObjectOptions{})
	if minio.ToErrorResponse(err).Code == minio.NoSuchKey {
		return nil, "", fmt.Errorf("object %s: %w", key, os.ErrNotExist)
	}
	if err != nil {
		return nil, "", fmt.Errorf("object %s: %w", key, err)
	}
	defer body.Close()
	data, err := io.ReadAll(io.LimitReader(body, limit+1))
	if err != nil {
		return nil, "", fmt.Errorf("object %s: %w", key, err)
	}
	if int64(len(data)) > limit {
		return nil, "", rara.Terminal("POINTER_INVALID", "object %s has more than %d bytes", key, limit)
	}
	return data, info.ETag, nil
}
