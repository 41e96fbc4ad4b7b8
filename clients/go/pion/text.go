package pion

import (
	"context"
	"io"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// checkText refuses a message with text that is not UTF-8. gRPC says of such a one what it says of a
// connection that breaks, and it would be asked again and again.
func checkText(message protoreflect.Message) (err error) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch kind := field.Kind(); {
		case kind != protoreflect.StringKind && kind != protoreflect.MessageKind || field.IsMap():
		case field.IsList():
			list := value.List()
			for i := 0; i < list.Len() && err == nil; i++ {
				err = checkValue(field, list.Get(i))
			}
		default:
			err = checkValue(field, value)
		}
		return err == nil
	})
	return err
}

func checkValue(field protoreflect.FieldDescriptor, value protoreflect.Value) error {
	if field.Kind() == protoreflect.MessageKind {
		return checkText(value.Message())
	}
	if text := value.String(); !utf8.ValidString(text) {
		return invalid(string(field.Name()), "%.100q is not UTF-8", text)
	}
	return nil
}

// checked are the interceptors of a connection whose messages are checked before they are sent, and that
// notes whether its server is there.
func checked(away *absence) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(
			ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, call grpc.UnaryInvoker,
			options ...grpc.CallOption,
		) error {
			if message, ok := request.(proto.Message); ok {
				if err := checkText(message.ProtoReflect()); err != nil {
					return err
				}
			}
			err := call(ctx, method, request, answer, conn, options...)
			away.note(ctx, err)
			return err
		}),
		grpc.WithChainStreamInterceptor(func(
			ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
			options ...grpc.CallOption,
		) (grpc.ClientStream, error) {
			stream, err := open(ctx, desc, conn, method, options...)
			if err != nil {
				away.note(ctx, err)
				return nil, err
			}
			return checkedStream{stream, away}, nil
		}),
	}
}

type checkedStream struct {
	grpc.ClientStream
	away *absence
}

func (s checkedStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	if err == io.EOF {
		s.away.note(s.Context(), nil)
	} else {
		s.away.note(s.Context(), err)
	}
	return err
}

// SendMsg passes frames as they are: their header was checked when it was made.
func (s checkedStream) SendMsg(message any) error {
	if message, ok := message.(proto.Message); ok {
		if err := checkText(message.ProtoReflect()); err != nil {
			return err
		}
	}
	return s.ClientStream.SendMsg(message)
}
