package engine

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

const (
	maxArtifacts = 1000 // in one manifest
	// All of a manifest but the inline bytes: with the output and these it has to fit into one frame.
	maxManifestBytes = 1 << 20

	artifactInvalid = "ARTIFACT_INVALID"
)

// The scheduler's rules, kept here as well so that no work is done in vain.
var (
	namePart  = `[A-Za-z0-9_%](?:[A-Za-z0-9_%.=+@,-]*[A-Za-z0-9_%=+@,-])?`
	nameShape = regexp.MustCompile(`^` + namePart + `(?:/` + namePart + `)*$`)
	types     = []string{"dataset", "model", "index", "metrics", "report", "checkpoint", "blob"}
	mediaType = regexp.MustCompile("^[A-Za-z0-9!#$&^_.+-]{1,127}/[A-Za-z0-9!#$&^_.+-]{1,127}(?:;[ -~]{1,200})?$")
)

// CheckName refuses what an artifact of a checkpoint cannot be called.
func CheckName(name string) error {
	return checkOutput(Output{Name: name, Type: "checkpoint", MediaType: "application/octet-stream"})
}

// checkOutput refuses what an output cannot be called. Final: the next attempt would call it the same.
func checkOutput(output Output) error {
	invalid := func(format string, args ...any) error {
		no := false
		return &codes.Failure{Code: artifactInvalid, Message: fmt.Sprintf(format, args...), Retryable: &no}
	}
	switch {
	case len(output.Name) > 255 || !nameShape.MatchString(output.Name):
		return invalid("artifact name %s: must be 1 to 255 characters: parts joined by /, each of letters, digits and "+
			"_ %% . - = + @ , beginning with a letter, digit, _ or %% and not ending with a dot", shown(output.Name))
	case !slices.Contains(types, output.Type):
		return invalid("artifact %s: type %s: must be one of %s",
			output.Name, shown(output.Type), strings.Join(types, ", "))
	case !mediaType.MatchString(output.MediaType):
		return invalid("artifact %s: media type %s: must be a media type, such as text/plain",
			output.Name, shown(output.MediaType))
	}
	return nil
}

// shown is for a message: short, and with nothing in it that changes how the rest is read.
func shown(text string) string {
	if len(text) > 80 {
		text = text[:80] + "..."
	}
	return fmt.Sprintf("%+q", text)
}
