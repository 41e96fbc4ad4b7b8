// Package pion is the Go client of pion-grpc: it stores the K/V of prompt prefixes, finds the longest
// one that a prompt begins with, and brings it back with the bits that were stored.
//
//	client, err := pion.Dial("127.0.0.1:50051", pion.Options{})
//	match, err := client.Match(ctx, pion.MatchRequest{Model: model, TokenIDs: prompt})
//	if err == nil && match.Hit {
//		prefix, err := client.Fetch(ctx, pion.FetchRequest{LeaseID: match.LeaseID, End: match.ServedTokens})
//		…
//	}
//
// A miss is an answer, an error is an error: Fetch, Match and Lookup say Hit, and Reason where they do
// not. A Prefix is whole and every chunk of it has been checked, or it is not returned.
//
// Deadlines are the context's. A call with one answer whose context has none gets Options.Timeout; a
// stream lives as long as it brings something within Options.StallTimeout. Reads are asked again where
// that is safe, broken fetches go on where they broke: three times in a row without anything coming, or
// as long as the server has been away for less than Options.Timeout, or until the context's deadline if it
// has one. A Store is repeated only as a whole, and only where the transport failed.
//
// Errors of calls are *Error; errors.Is compares their reasons:
//
//	if errors.Is(err, pion.ReasonOtherContent) { … }
package pion
