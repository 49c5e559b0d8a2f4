// Package sinks writes to stores outside in a way that a superseded attempt loses, however late it comes.
//
// Each write carries the job's lease token, which is larger for every later attempt, and the store keeps the largest: a
// write under a smaller one returns an error that is ErrSuperseded, and changes nothing. The same token may write again.
// The Python SDK's rara_executor.sinks writes the same columns, files and pointers: attempts in both languages fence
// each other.
//
// Objects of S3-compatible stores are in the package s3sink below, so that only who imports it has its dependencies.
package sinks
