package engine

import (
	"strconv"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

// Versions are those of the contract that a peer speaks, from the oldest to the newest.
type Versions struct{ Oldest, Newest uint32 }

const newestVersion = 1

// OurVersions are the newest, and the one before it.
var OurVersions = Versions{Oldest: max(1, newestVersion-1), Newest: newestVersion}

func (v Versions) has(version uint32) bool { return v.Oldest <= version && version <= v.Newest }

// fallBack returns what to say in the next Hello to a scheduler that speaks theirs alone. False: nothing that is new.
func (v Versions) fallBack(spoken uint32, theirs Versions) (uint32, bool) {
	version := min(v.Newest, theirs.Newest)
	return version, version != spoken && v.has(version) && theirs.has(version)
}

// metadata of a refusal, for the other side to fall back by.
func (v Versions) metadata() map[string]string {
	return map[string]string{
		"oldest": strconv.FormatUint(uint64(v.Oldest), 10), "newest": strconv.FormatUint(uint64(v.Newest), 10)}
}

// versionsOf tells what a scheduler speaks that refused our version. False: it was no such refusal.
func versionsOf(err error) (Versions, bool) {
	for _, detail := range status.Convert(err).Details() {
		info, ok := detail.(*errdetails.ErrorInfo)
		if !ok || info.Reason != codes.VersionUnsupported {
			continue
		}
		oldest, errOldest := strconv.ParseUint(info.Metadata["oldest"], 10, 32)
		newest, errNewest := strconv.ParseUint(info.Metadata["newest"], 10, 32)
		if errOldest == nil && errNewest == nil {
			return Versions{uint32(oldest), uint32(newest)}, true
		}
	}
	return Versions{}, false
}
