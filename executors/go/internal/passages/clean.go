package passages

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/rara-run/rara/executors/go/rara"
)

const (
	mediaType   = "application/jsonl"
	reportEvery = 250 * time.Millisecond
)

// Expected is what the step before has counted.
type Expected struct {
	Documents int `json:"documents"`
}

// Summary of a cleaned corpus.
type Summary struct {
	Documents            int `json:"documents"`
	DocumentsWithoutText int `json:"documents_without_text"`
	Passages             int `json:"passages"`
	DuplicatePassages    int `json:"duplicate_passages"`
}

type document struct {
	Name       string `json:"name"`
	Title      string `json:"title"`
	Text       string `json:"text"`
	IsMarkdown bool   `json:"is_markdown"`
}

// Clean cuts the documents of the artifact `corpus` into clean passages, each text once, as the artifact `documents`.
// Two passages are the same if their texts are, after normalising: NFC, line ends, control characters, blanks, markup.
func Clean(ctx context.Context, job *rara.Job[Expected]) (Summary, error) {
	source, err := job.Artifacts.Open(ctx, "corpus")
	if err != nil {
		return Summary{}, err
	}
	folder, err := job.Scratch()
	if err != nil {
		return Summary{}, err
	}
	path := filepath.Join(folder, "documents.jsonl")
	cleaner := &cleaner{job: job, seen: map[string]bool{}}
	if err := cleaner.files(ctx, source.Path, path); err != nil {
		return Summary{}, err
	}
	summary := cleaner.summary
	if summary.Documents == 0 {
		return Summary{}, rara.Terminal("CORPUS_EMPTY", "none of %d documents holds text", job.Input.Documents)
	}
	_, err = job.Artifacts.PutFile(ctx, "documents", path,
		rara.Output{Type: "dataset", MediaType: mediaType, Metadata: summary})
	if err != nil {
		return Summary{}, err
	}
	return summary, cleaner.report(summary.Documents)
}

type cleaner struct {
	job      *rara.Job[Expected]
	seen     map[string]bool
	summary  Summary
	reported time.Time
}

func (c *cleaner) files(ctx context.Context, from, to string) error {
	reader, err := os.Open(from)
	if err != nil {
		return err
	}
	defer reader.Close()
	writer, err := os.Create(to)
	if err != nil {
		return err
	}
	defer writer.Close()
	buffered := bufio.NewWriterSize(writer, 1<<20)
	if err := c.documents(ctx, reader, buffered); err != nil {
		return err
	}
	if err := buffered.Flush(); err != nil {
		return err
	}
	return writer.Close()
}

func (c *cleaner) documents(ctx context.Context, reader io.Reader, writer io.Writer) error {
	decoder := json.NewDecoder(bufio.NewReaderSize(reader, 1<<20))
	for ctx.Err() == nil {
		var next document
		switch err := decoder.Decode(&next); {
		case err == io.EOF:
			return nil
		case err != nil:
			return rara.Terminal("CORPUS_INVALID", "the corpus is not JSON lines: %w", err)
		}
		if _, err := writer.Write(c.document(next)); err != nil {
			return err
		}
		if time.Since(c.reported) >= reportEvery {
			if err := c.report(c.job.Input.Documents); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// document as its clean line; nothing, if it holds no text. A passage's text stands with the first document that has it;
// the others name its hash.
func (c *cleaner) document(given document) []byte {
	parts := Split(given.Text, given.IsMarkdown, maxChars)
	if len(parts) == 0 {
		c.summary.DocumentsWithoutText++
		return nil
	}
	var hashes, order []string
	fresh := map[string]Passage{}
	for _, part := range parts {
		hash := part.SHA256()
		hashes = append(hashes, hash)
		if c.seen[hash] {
			continue
		}
		if _, again := fresh[hash]; !again {
			order = append(order, hash)
		}
		fresh[hash] = part // of two in one document the later heading stays
	}
	for _, hash := range order {
		c.seen[hash] = true
	}
	c.summary.Documents++
	c.summary.Passages = len(c.seen)
	c.summary.DuplicatePassages += len(parts) - len(order)
	return line(given, hashes, order, fresh)
}

func (c *cleaner) report(expected int) error {
	c.reported = time.Now()
	done := c.summary.Documents
	progress := rara.Progress{
		Message: fmt.Sprintf("%d of %d documents cleaned", done, expected),
		Metrics: map[string]float64{"documents": float64(done), "passages": float64(c.summary.Passages)},
	}
	if expected > 0 {
		progress.Fraction = new(float64(done) / float64(expected))
	}
	return c.job.Progress(progress)
}
