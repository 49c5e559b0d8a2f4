package passages_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"reflect"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/passages"
)

// The cases are those of tests/unit/test_pipeline_passages.py: both languages cut alike.
func TestSplitCutsAsPythonDoes(t *testing.T) {
	t.Parallel()
	file, err := os.Open("testdata/passages.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	decoder := json.NewDecoder(file)
	for number := 1; ; number++ {
		var given struct {
			Text       string
			IsMarkdown bool `json:"is_markdown"`
			Limit      int
			Passages   [][2]string
		}
		if err := decoder.Decode(&given); errors.Is(err, io.EOF) {
			if number < 100 {
				t.Errorf("only %d cases", number)
			}
			return
		} else if err != nil {
			t.Fatal(err)
		}
		got := [][2]string{}
		for _, passage := range passages.Split(given.Text, given.IsMarkdown, given.Limit) {
			got = append(got, [2]string{passage.Heading, passage.Text})
		}
		if !reflect.DeepEqual(got, given.Passages) {
			t.Errorf("line %d: %q\n got %q\nwant %q", number, given.Text, got, given.Passages)
		}
	}
}
