package probes

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"os"
	"time"

	"github.com/rara-run/rara/executors/go/rara"
)

const bulkName = "large"

// RegisterBulk offers `bulk.make` and `bulk.read`, which move one large artifact.
func RegisterBulk(registry *rara.Registry) {
	rara.Register(registry, "bulk.make", version, bulkMake)
	rara.Register(registry, "bulk.read", version, bulkRead)
}

type bulkInput struct {
	SizeBytes int64  `json:"size_bytes"`
	Seed      uint64 `json:"seed"`
	Folder    string `json:"folder"`
}

type bulkMade struct {
	SHA256    string  `json:"sha256"`
	SizeBytes int64   `json:"size_bytes"`
	PutS      float64 `json:"put_s"`
}

// bulkMake puts `size_bytes` that follow from `seed` as artifact `large`. put_s: how long the SDK took.
func bulkMake(ctx context.Context, job *rara.Job[bulkInput]) (bulkMade, error) {
	file, err := os.CreateTemp(job.Input.Folder, "bulk-")
	if err != nil {
		return bulkMade{}, err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if err := fill(file, job.Input); err != nil {
		return bulkMade{}, err
	}
	began := time.Now()
	put, err := job.Artifacts.PutFile(ctx, bulkName, file.Name(), rara.Output{})
	if err != nil {
		return bulkMade{}, err
	}
	return bulkMade{put.SHA256, put.SizeBytes, time.Since(began).Seconds()}, nil
}

// fill writes blocks of which every one is another, so that no disk can keep it once.
func fill(file io.Writer, input bulkInput) error {
	block := make([]byte, 1<<20)
	source := rand.New(rand.NewPCG(input.Seed, 1))
	for i := 0; i < len(block); i += 8 {
		binary.LittleEndian.PutUint64(block[i:], source.Uint64())
	}
	for left := input.SizeBytes; left > 0; left -= int64(len(block)) {
		binary.LittleEndian.PutUint64(block, uint64(left))
		if _, err := file.Write(block[:min(left, int64(len(block)))]); err != nil {
			return err
		}
	}
	return nil
}

type bulkReadOutput struct {
	SHA256 string  `json:"sha256"`
	OpenS  float64 `json:"open_s"`
}

// bulkRead opens artifact `large` and reads it. open_s: how long the SDK took. sha256: of what was read.
func bulkRead(ctx context.Context, job *rara.Job[struct{}]) (bulkReadOutput, error) {
	began := time.Now()
	given, err := job.Artifacts.Open(ctx, bulkName)
	if err != nil {
		return bulkReadOutput{}, err
	}
	openS := time.Since(began).Seconds()
	file, err := os.Open(given.Path)
	if err != nil {
		return bulkReadOutput{}, err
	}
	defer file.Close()
	hash := sha256.New()
	_, err = io.Copy(hash, file)
	return bulkReadOutput{hex.EncodeToString(hash.Sum(nil)), openS}, err
}
