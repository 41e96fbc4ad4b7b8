package pion

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
)

const (
	triesMax  = 3 // of a read that brings nothing, once patience is over
	pauseStep = 100 * time.Millisecond
	pauseMax  = time.Second
)

type unary[Request, Answer any] func(context.Context, Request, ...grpc.CallOption) (Answer, error)

// once makes a call with one answer, once.
func once[Request, Answer any](
	c *Client, ctx context.Context, route string, call unary[Request, Answer], request Request,
) (Answer, error) {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	answer, err := call(c.Outgoing(ctx, route), request)
	return answer, errorOf(ctx, err)
}

// ask makes a call with one answer that changes nothing, so that it may be tried again.
func ask[Request, Answer any](
	c *Client, ctx context.Context, route string, call unary[Request, Answer], request Request,
) (answer Answer, err error) {
	patient := c.patience(ctx)
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	out := c.Outgoing(ctx, route)
	for attempt := 1; ; attempt++ {
		answer, err = call(out, request)
		if err = errorOf(ctx, err); err == nil || !pause(ctx, err, attempt, patient) {
			return answer, err
		}
	}
}

// whole repeats a stream that is idempotent as a whole, where only the transport failed.
func whole[Answer any](c *Client, ctx context.Context, send func() (Answer, error)) (Answer, error) {
	patient := c.patience(ctx)
	for attempt := 1; ; attempt++ {
		answer, err := send()
		var known *Error
		if errors.As(err, &known) && known.FromTransport && pause(ctx, err, attempt, patient) {
			continue
		}
		return answer, err
	}
}

// bounded gives a context a deadline if it has none.
func (c *Client) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.options.Timeout)
}

// absence is for how long a server has not been reached, though it was called.
type absence struct{ since atomic.Pointer[time.Time] }

// note notes how a call ended, or that something of its answer has come.
func (a *absence) note(ctx context.Context, err error) {
	var known *Error
	switch {
	case err != nil && context.Cause(ctx) != nil: // our own side ended it
	case err == nil || errors.As(errorOf(ctx, err), &known) && !known.FromTransport:
		if a.since.Load() != nil {
			a.since.Store(nil)
		}
	case known != nil && known.Reason == ReasonUnavailable:
		now := time.Now()
		a.since.CompareAndSwap(nil, &now)
	}
}

func (a *absence) lasted() time.Duration {
	if since := a.since.Load(); since != nil {
		return time.Since(*since)
	}
	return 0
}

// patience is how long a server that cannot be reached is waited for, when all tries are used up: by a
// caller that gave a deadline until then; by others until it has been away for Options.Timeout, as it may be
// starting anew. One that stays away costs that once, and is not waited for until it has answered.
type patience struct {
	always bool
	after  time.Duration
	until  time.Time
}

func (c *Client) patience(ctx context.Context) *patience {
	p := &patience{after: max(c.options.Timeout-c.away.lasted(), 0)}
	_, p.always = ctx.Deadline()
	return p
}

func (p *patience) lasts(err error, attempt int) bool {
	if attempt <= 1 {
		p.until = time.Now().Add(p.after)
	}
	return p.always || (errors.Is(err, ReasonUnavailable) && time.Now().Before(p.until))
}

// pause waits before a read is asked again; false if it should not be, or not in time. attempt is how
// many in a row have brought nothing.
func pause(ctx context.Context, err error, attempt int, patient *patience) bool {
	wait, ok := mayAskAgain(err)
	if lasts := patient.lasts(err, attempt); !ok || (attempt >= triesMax && !lasts) {
		return false
	}
	if wait == 0 { // spread, so that clients do not come back in step
		wait = min(pauseStep*time.Duration(max(attempt, 1)), pauseMax)
		wait += time.Duration(rand.Int64N(int64(wait / 2)))
	}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= wait {
		return false
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// mayAskAgain tells whether the same read may be asked once more, and how long the server asks to wait.
func mayAskAgain(err error) (time.Duration, bool) {
	var known *Error
	if !errors.As(err, &known) {
		return 0, false
	}
	switch known.Reason {
	case ReasonUnavailable:
		return 0, known.FromTransport
	case ReasonStarting, ReasonDraining, ReasonTooManyStreams, ReasonStalled:
		return known.RetryAfter, true
	}
	return 0, false
}

// watchdog ends a stream that makes no progress: it is wound up before gRPC is waited for, and stopped
// while the caller's own code runs.
type watchdog struct {
	timer *time.Timer
	after time.Duration
}

// watched returns a context that ends with errStalled if the watchdog is not stopped in time.
func (c *Client) watched(ctx context.Context) (context.Context, *watchdog, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	after := c.options.StallTimeout
	dog := &watchdog{time.AfterFunc(after, func() { cancel(errStalled) }), after}
	return ctx, dog, func() {
		dog.stop()
		cancel(nil) // what is abandoned without it runs on at the server
	}
}

func (w *watchdog) wind() { w.timer.Reset(w.after) }
func (w *watchdog) stop() { w.timer.Stop() }
