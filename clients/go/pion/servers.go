package pion

import (
	"context"
	"slices"
	"strings"

	"pion-grpc/clients/go/pionv1"
)

// Describe describes the server: version, limits, codecs, budgets, totals. Of several nodes, it describes what
// they are together: what is counted is the sum, a limit the smallest, a codec or a feature one that all have.
// No node is left out: if one cannot be reached, that is the answer. So it is with Stats.
func (c *Client) Describe(ctx context.Context) (*pionv1.PrefixStoreDescribeResponse, error) {
	var all *pionv1.PrefixStoreDescribeResponse
	for _, ctx := range c.each(ctx) {
		one, err := ask(c, ctx, "", c.prefixes.Describe, &pionv1.PrefixStoreDescribeRequest{})
		if err != nil {
			return nil, err
		}
		if all == nil {
			all = one
		} else {
			addDescription(all, one)
		}
	}
	return all, nil
}

// Stats returns the value receipt: what the store did for its clients, all nodes together.
func (c *Client) Stats(ctx context.Context) (*pionv1.Receipt, error) {
	var all *pionv1.Receipt
	for _, ctx := range c.each(ctx) {
		one, err := ask(c, ctx, "", c.stats.Get, &pionv1.StatsGetRequest{})
		if err != nil {
			return nil, err
		}
		all = addReceipt(all, one.GetReceipt())
	}
	return all, nil
}

// ResetStats sets every counter to zero, and returns what they were. With an error that is what is known of
// them: nodes that were asked before have been reset.
func (c *Client) ResetStats(ctx context.Context) (*pionv1.Receipt, error) {
	var all *pionv1.Receipt
	for _, ctx := range c.each(ctx) {
		one, err := once(c, ctx, "", c.stats.Reset, &pionv1.StatsResetRequest{})
		if err != nil {
			return all, err
		}
		all = addReceipt(all, one.GetReceipt())
	}
	return all, nil
}

func addReceipt(all, one *pionv1.Receipt) *pionv1.Receipt {
	if all == nil || one == nil {
		return one
	}
	all.Hits += one.Hits
	all.Misses += one.Misses
	all.MeasuredHits += one.MeasuredHits
	all.TokensServed += one.TokensServed
	all.BytesStreamed += one.BytesStreamed
	all.BytesExported += one.BytesExported
	all.PrefillSecondsAvoided += one.PrefillSecondsAvoided
	all.PrefillSecondsAvoidedMeasured += one.PrefillSecondsAvoidedMeasured
	all.PrefillSecondsAvoidedEstimated += one.PrefillSecondsAvoidedEstimated
	all.SinceUnixMs = min(all.SinceUnixMs, one.SinceUnixMs)
	return all
}

func addDescription(all, one *pionv1.PrefixStoreDescribeResponse) {
	all.Version = bothOf(all.Version, one.Version)
	limits := map[string]uint64{}
	for _, limit := range one.Limits {
		limits[limit.Name] = limit.Value
	}
	for _, limit := range all.Limits {
		if value, ok := limits[limit.Name]; ok {
			limit.Value = min(limit.Value, value)
		}
	}
	all.Codecs = slices.DeleteFunc(all.Codecs, func(codec string) bool { return !slices.Contains(one.Codecs, codec) })
	if all.AttendBackend == "" || one.AttendBackend == "" {
		all.AttendBackend = "" // a session may lie on any of them
	} else {
		all.AttendBackend = bothOf(all.AttendBackend, one.AttendBackend)
	}
	if all.TenantBudgetBytes == 0 || one.TenantBudgetBytes == 0 {
		all.TenantBudgetBytes = 0 // no quota
	} else {
		all.TenantBudgetBytes += one.TenantBudgetBytes
	}
	all.DiskBudgetBytes += one.DiskBudgetBytes
	all.DiskUsedBytes += one.DiskUsedBytes
	all.ResidentBudgetBytes += one.ResidentBudgetBytes
	all.ResidentUsedBytes += one.ResidentUsedBytes
	all.PrefixCount += one.PrefixCount
	all.RowCount += one.RowCount
	all.EvictedCount += one.EvictedCount
	all.CorruptCount += one.CorruptCount
	all.LiveBytes += one.LiveBytes
	all.AttendWarm += one.AttendWarm
	all.AttendCold += one.AttendCold
	all.AttendDemotions += one.AttendDemotions
	all.AttendRehydrates += one.AttendRehydrates
	all.StartedUnixMs = max(all.StartedUnixMs, one.StartedUnixMs)
	all.ExportEnabled = all.ExportEnabled && one.ExportEnabled
}

func bothOf(all, one string) string {
	if slices.Contains(strings.Split(all, ", "), one) {
		return all
	}
	return all + ", " + one
}
