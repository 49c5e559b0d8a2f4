package s3sink_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/rara-run/rara/executors/go/rara"
	"github.com/rara-run/rara/executors/go/rara/sinks"
	"github.com/rara-run/rara/executors/go/rara/sinks/s3sink"
)

const writers = 8

func store(t *testing.T) *s3sink.Store {
	t.Helper()
	address := os.Getenv("RARA_TEST_S3")
	if address == "" {
		t.Skip("tests/wire/test_sinks.py runs this with an S3 server")
	}
	client, err := minio.New(address, &minio.Options{
		Creds: credentials.NewStaticV4("an-access-key", "a-secret-key", ""), Region: "us-east-1"})
	if err != nil {
		t.Fatal(err)
	}
	return &s3sink.Store{Client: client, Bucket: os.Getenv("RARA_TEST_BUCKET")}
}

func isSuperseded(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, sinks.ErrSuperseded) {
		t.Fatalf("got %v", err)
	}
}

func put(ctx context.Context, store *s3sink.Store, token int64, path, text string) error {
	_, err := store.Put(ctx, token, path, bytes.NewReader([]byte(text)))
	return err
}

func check(t *testing.T, store *s3sink.Store, path, want string, token int64) {
	t.Helper()
	data, err := store.Get(t.Context(), path)
	if err != nil || string(data) != want {
		t.Fatalf("got %q %v", data, err)
	}
	pointer, err := store.Pointer(t.Context(), path)
	if err != nil || pointer.LeaseToken != token || pointer.SizeBytes != int64(len(want)) {
		t.Fatalf("got %v %v", pointer, err)
	}
}

func TestAnObjectKeepsTheLargestToken(t *testing.T) {
	store, ctx := store(t), t.Context()
	if err := store.Check(ctx, "go/probe"); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		token int64
		text  string
	}{{5, "five"}, {5, "five again"}, {7, "the same"}, {8, "the same"}} {
		if err := put(ctx, store, step.token, "go/model", step.text); err != nil {
			t.Fatal(err)
		}
		check(t, store, "go/model", step.text, step.token)
	}
	isSuperseded(t, put(ctx, store, 7, "go/model", "the same"))
	check(t, store, "go/model", "the same", 8)
	if _, err := store.Get(ctx, "go/none"); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
}

func TestOfWritersAtOnceTheLargestTokenStays(t *testing.T) {
	store, ctx := store(t), t.Context()
	for round := range 3 {
		path := fmt.Sprintf("go/contended-%d", round)
		tokens := rand.Perm(1000)[:writers]
		var done sync.WaitGroup
		largest := 0
		for _, token := range tokens {
			largest = max(largest, token+1)
			done.Go(func() {
				err := put(ctx, store, int64(token+1), path, fmt.Sprint(token+1))
				if err != nil && !errors.Is(err, sinks.ErrSuperseded) {
					t.Error(err)
				}
			})
		}
		done.Wait()
		check(t, store, path, fmt.Sprint(largest), int64(largest))
	}
}

func TestAnObjectOfSomebodyElseIsNotReplaced(t *testing.T) {
	store, ctx := store(t), t.Context()
	text := []byte("no pointer")
	_, err := store.Client.PutObject(ctx, store.Bucket, "go/foreign", bytes.NewReader(text), int64(len(text)),
		minio.PutObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var own *rara.Error
	if err := put(ctx, store, 5, "go/foreign", "x"); !errors.As(err, &own) || own.Code != "POINTER_INVALID" {
		t.Fatalf("got %v", err)
	}
}

// TestAcrossLanguages is the middle of a test in Python, which has written under 5 before and looks afterwards.
func TestAcrossLanguages(t *testing.T) {
	store, ctx := store(t), t.Context()
	check(t, store, "shared", "python", 5)
	isSuperseded(t, put(ctx, store, 4, "shared", "go"))
	if err := put(ctx, store, 6, "shared", "go"); err != nil {
		t.Fatal(err)
	}
}

func ExampleStore_Put() {
	client, err := minio.New("s3.example.com", &minio.Options{Creds: credentials.NewEnvAWS(), Secure: true})
	if err != nil {
		panic(err)
	}
	store := &s3sink.Store{Client: client, Bucket: "models"}
	registry := rara.NewRegistry()
	rara.Register(registry, "model.publish", "1.0.0", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		model, err := job.Artifacts.Open(ctx, "model")
		if err != nil {
			return nil, err
		}
		file, err := os.Open(model.Path)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		return store.Put(ctx, job.LeaseToken, "production", file)
	})
}
