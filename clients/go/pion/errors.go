package pion

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const errorDomain = "pion.v1"

// Reason is one word about why a call failed. It is an error itself, so that errors.Is(err, reason)
// asks for it.
type Reason string

// Error returns the word.
func (r Reason) Error() string { return string(r) }

// The reasons that cross the wire; pion.v1.ErrorReason says more about each.
const (
	ReasonInvalid          Reason = "INVALID"
	ReasonChecksum         Reason = "CHECKSUM"
	ReasonRows             Reason = "ROWS"
	ReasonLayout           Reason = "LAYOUT"
	ReasonGeneration       Reason = "GENERATION"
	ReasonOtherContent     Reason = "OTHER_CONTENT"
	ReasonNotStored        Reason = "NOT_STORED"
	ReasonEvicted          Reason = "EVICTED"
	ReasonCold             Reason = "COLD"
	ReasonMissing          Reason = "MISSING"
	ReasonBudget           Reason = "BUDGET"
	ReasonQuota            Reason = "QUOTA"
	ReasonDiskFull         Reason = "DISK_FULL"
	ReasonTooManyStreams   Reason = "TOO_MANY_STREAMS"
	ReasonNoBackend        Reason = "NO_BACKEND"
	ReasonStarting         Reason = "STARTING"
	ReasonDraining         Reason = "DRAINING"
	ReasonCorrupt          Reason = "CORRUPT"
	ReasonStalled          Reason = "STALLED"
	ReasonNotAuthenticated Reason = "NOT_AUTHENTICATED"
	ReasonNotAllowed       Reason = "NOT_ALLOWED"
	ReasonInternal         Reason = "INTERNAL"
	ReasonConflict         Reason = "CONFLICT"
)

// Reasons that this client gives itself.
const (
	// ReasonUnavailable: the server cannot be reached, or the connection broke.
	ReasonUnavailable Reason = "UNAVAILABLE"
	// ReasonDeadlineExceeded: no answer in time, or a stream that brought nothing for too long.
	ReasonDeadlineExceeded Reason = "DEADLINE_EXCEEDED"
	// ReasonCanceled: the context was canceled.
	ReasonCanceled Reason = "CANCELED"
	// ReasonBadAnswer: the answer contradicts itself or the request; nothing of it was used.
	ReasonBadAnswer Reason = "BAD_ANSWER"
	// ReasonClosed: the client has been closed.
	ReasonClosed Reason = "CLOSED"
	// ReasonUnsupported: this client cannot take rows in such a codec, or the server no such call.
	ReasonUnsupported Reason = "UNSUPPORTED"
)

// Error is what a call failed with.
type Error struct {
	Reason   Reason
	Message  string            // for people
	Metadata map[string]string // what the server says about it, such as "namespace" or "needed_bytes"
	// RetryAfter is how long the server asks to wait; 0 where waiting does not help.
	RetryAfter time.Duration
	// FromTransport tells that the transport or a proxy failed, not the server.
	FromTransport bool

	cause error
}

// Error returns reason and message.
func (e *Error) Error() string { return fmt.Sprintf("pion: %s: %s", e.Reason, e.Message) }

// Unwrap returns what lies beneath: the context's error, or the status of the call.
func (e *Error) Unwrap() error { return e.cause }

// Is compares the reason, so that errors.Is(err, ReasonConflict) works.
func (e *Error) Is(target error) bool {
	reason, ok := target.(Reason)
	return ok && reason == e.Reason
}

// Statuses that nobody put an ErrorInfo to. Unknown is what gRPC makes of a connection whose HTTP/2
// stream was damaged; a proxy whose backend died says Internal.
var reasonsByCode = map[codes.Code]Reason{
	codes.Unavailable:      ReasonUnavailable,
	codes.Internal:         ReasonUnavailable,
	codes.Canceled:         ReasonUnavailable,
	codes.Unknown:          ReasonUnavailable,
	codes.DeadlineExceeded: ReasonDeadlineExceeded,
	codes.Unimplemented:    ReasonUnsupported,
	codes.Unauthenticated:  ReasonNotAuthenticated,
	codes.PermissionDenied: ReasonNotAllowed,
}

// ofCaller marks an error of the caller's own code: it ends the call, whatever it is, and is returned as
// it is. It may well come from another client of this package, and must not be taken for this one's.
type ofCaller struct{ error }

func fromCaller(err error) error {
	if err == nil {
		return nil
	}
	return ofCaller{err}
}

// errStalled ends a stream that brought nothing for too long; it is the cause of its context's end.
var errStalled = errors.New("the stream made no progress")

// errorOf returns what the end of a call means. Errors that are no statuses stay what they are.
func errorOf(ctx context.Context, err error) error {
	var known *Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	state, ok := status.FromError(err)
	if !ok {
		return err
	}
	if info, retry := details(state); info != nil {
		return &Error{
			Reason:     Reason(info.GetReason()),
			Message:    state.Message(),
			Metadata:   info.GetMetadata(),
			RetryAfter: retry.GetRetryDelay().AsDuration(),
			cause:      err,
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		return endedBy(cause)
	}
	if errors.Is(err, grpc.ErrClientConnClosing) {
		return &Error{Reason: ReasonClosed, Message: "the client has been closed", cause: err}
	}
	reason, ok := reasonsByCode[state.Code()]
	if !ok {
		reason = Reason(state.Code().String())
	}
	if reason == ReasonUnavailable && refusesCertificate(state.Message()) {
		reason = ReasonNotAuthenticated // asking again changes nothing
	}
	if reason == ReasonDeadlineExceeded { // the server's clock may be the first to say so
		err = errors.Join(context.DeadlineExceeded, err)
	}
	message := state.Code().String() + ": " + state.Message()
	return &Error{Reason: reason, Message: message, FromTransport: true, cause: err}
}

// refusesCertificate tells whether a connection failed because one side does not trust the other's
// certificate. gRPC passes on nothing but the text of crypto/tls.
func refusesCertificate(message string) bool {
	_, alert, ours := strings.Cut(message, "remote error: tls: ")
	return strings.Contains(message, "x509: ") || (ours && strings.Contains(alert, "certificate"))
}

// endedBy returns the error of a call that its context ended.
func endedBy(cause error) *Error {
	reason := ReasonCanceled
	if errors.Is(cause, context.DeadlineExceeded) || errors.Is(cause, errStalled) {
		reason = ReasonDeadlineExceeded
	}
	return &Error{Reason: reason, Message: cause.Error(), cause: cause}
}

func details(state *status.Status) (info *errdetails.ErrorInfo, retry *errdetails.RetryInfo) {
	for _, detail := range state.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == errorDomain {
				info = detail
			}
		case *errdetails.RetryInfo:
			retry = detail
		}
	}
	return info, retry
}

func invalid(field, format string, values ...any) *Error {
	return &Error{
		Reason:   ReasonInvalid,
		Message:  field + ": " + fmt.Sprintf(format, values...),
		Metadata: map[string]string{"field": field},
	}
}

func badAnswer(format string, values ...any) *Error {
	return &Error{Reason: ReasonBadAnswer, Message: fmt.Sprintf(format, values...)}
}
