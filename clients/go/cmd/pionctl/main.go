// Command pionctl shows the Go client in use: it lists and describes what a server stores, and moves
// prefixes between servers and files. The files are those of `pion-grpc export` and `import`.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"pion-grpc/clients/go/internal/segment"
	"pion-grpc/clients/go/pion"
	"pion-grpc/clients/go/wire"
)

const usage = `Usage: pionctl [flags] command

Commands:
  ls [PREFIX]      list what is stored under names that begin so
  stat [NAME]      describe a prefix; without a name, the server and, to its owner, its receipt
  get NAME FILE    write a prefix as a safetensors file
  put FILE [NAME]  store the prefix of such a file
  time NAME [N]    fetch a prefix N times (5) and say how long each took

A proxy of several nodes asks one of them, the one that the name leads to: a prefix that was stored with token
ids may be on another. With the nodes themselves in -address, named as they are everywhere and with commas between
them, all of them are asked, and put stores on the one that a proxy would choose.

The password comes from PION_PASSWORD; the other flags' defaults from PION_ADDRESS, PION_TENANT,
PION_TLS_CA, PION_TLS_CERT and PION_TLS_KEY.

Flags:
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "pionctl:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string, out, notes io.Writer) error {
	flags := flag.NewFlagSet("pionctl", flag.ContinueOnError)
	flags.SetOutput(notes)
	flags.Usage = func() {
		fmt.Fprint(notes, usage)
		flags.PrintDefaults()
	}
	address := flags.String("address", orElse(os.Getenv("PION_ADDRESS"), "127.0.0.1:50051"), "HOST:PORT or unix:PATH of the server; to ask all nodes of a mesh, all of theirs with commas between them")
	tenant := flags.String("tenant", os.Getenv("PION_TENANT"), "the tenant")
	authorities := flags.String("tls-ca", os.Getenv("PION_TLS_CA"), "encrypt, and trust the certificates of this PEM `file`; \"system\": the system's")
	certificate := flags.String("tls-cert", os.Getenv("PION_TLS_CERT"), "show the certificate of this PEM `file`")
	key := flags.String("tls-key", os.Getenv("PION_TLS_KEY"), "the certificate's key, a PEM `file`")
	replace := flags.Bool("replace", false, "put: replace what the name holds; get: replace the file")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	options := pion.Options{Tenant: *tenant, Password: os.Getenv("PION_PASSWORD")}
	if *authorities != "" || *certificate != "" || *key != "" {
		config, err := pion.TLSFromFiles(strings.TrimPrefix(*authorities, "system"), *certificate, *key)
		if err != nil {
			return err
		}
		options.TLS = config
	}
	var all nodes
	for _, address := range strings.Split(*address, ",") {
		client, err := pion.Dial(address, options)
		if err != nil {
			return err
		}
		defer client.Close()
		all = append(all, node{address, client})
	}

	command, rest := flags.Arg(0), flags.Args()[min(1, flags.NArg()):]
	switch {
	case command == "ls" && len(rest) <= 1:
		return list(ctx, all, strings.Join(rest, ""), out)
	case command == "stat" && len(rest) == 0:
		return describe(ctx, all, out)
	case command == "stat" && len(rest) == 1:
		return stat(ctx, all, rest[0], out)
	case command == "get" && len(rest) == 2:
		return get(ctx, all, rest[0], rest[1], *replace, out, notes)
	case command == "time" && (len(rest) == 1 || len(rest) == 2):
		return timed(ctx, all, rest[0], orElse(strings.Join(rest[1:], ""), "5"), out)
	case command == "put" && (len(rest) == 1 || len(rest) == 2):
		client, err := pion.Dial(*address, options) // of several nodes, it chooses the one that a proxy would
		if err != nil {
			return err
		}
		defer client.Close()
		return put(ctx, client, rest[0], strings.Join(rest[1:], ""), *replace, out)
	}
	flags.Usage()
	return flag.ErrHelp
}

// node is a server, or a proxy of several.
type node struct {
	address string
	client  *pion.Client
}

// nodes are all that are asked.
type nodes []node

// find returns what is stored under a name, and where. List asks without counting a hit or a miss.
func (n nodes) find(ctx context.Context, name string) (pion.PrefixInfo, *pion.Client, error) {
	var failed []error
	for _, node := range n {
		for info, err := range node.client.List(ctx, name) {
			if err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", node.address, err))
			} else if info.Namespace == name {
				return info, node.client, nil
			}
			break // of all names that begin so, itself would be the first
		}
	}
	switch {
	case len(failed) > 0:
		return pion.PrefixInfo{}, nil, errors.Join(failed...)
	case len(n) > 1:
		return pion.PrefixInfo{}, nil, fmt.Errorf("%q is on none of the %d nodes that were asked", name, len(n))
	}
	return pion.PrefixInfo{}, nil, fmt.Errorf(
		"%q is not on the node that was asked; if that was a proxy, it may be on another: -address takes all nodes", name)
}

func list(ctx context.Context, all nodes, prefix string, out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	defer table.Flush()
	fmt.Fprintln(table, "NAME\tTOKENS\tBYTES\tFIDELITY\tPARENT\tCREATED")
	for _, node := range all {
		for info, err := range node.client.List(ctx, prefix) {
			if err != nil {
				return fmt.Errorf("%s: %w", node.address, err)
			}
			fmt.Fprintf(table, "%s\t%d\t%d\t%s\t%s\t%s\n", printable(info.Namespace), info.TokenCount, info.StoredBytes,
				info.Fidelity, printable(info.Parent), info.Created.Format(time.DateTime))
		}
	}
	return nil
}

func stat(ctx context.Context, all nodes, name string, out io.Writer) error {
	info, _, err := all.find(ctx, name)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	defer table.Flush()
	fmt.Fprintf(table, "name\t%s\nmodel\t%s\nstate\t%v\ntokens\t%d\nparent\t%s\nbase\t%d\nbytes stored\t%d\nbytes of rows\t%d\nfidelity\t%s\ncreated\t%s\n",
		printable(info.Namespace), printable(info.Model), info.State, info.TokenCount, printable(info.Parent), info.Base,
		info.StoredBytes, info.RowBytes, info.Fidelity, info.Created.Format(time.RFC3339))
	for _, tensor := range info.Layout {
		fmt.Fprintf(table, "%s\t%d x %d %v, %s\n", tensor.Name(), tensor.Heads, tensor.HeadDim, tensor.DType, tensor.CodecName())
	}
	for _, part := range info.Parts {
		fmt.Fprintf(table, "part %s.%d\t%d bytes at %d tokens\n", printable(part.Kind), part.Slot, part.SizeBytes, part.BoundaryTokens)
	}
	return nil
}

func describe(ctx context.Context, all nodes, out io.Writer) error {
	for _, node := range all {
		if len(all) > 1 {
			fmt.Fprintf(out, "%s:\n", node.address)
		}
		if err := describeOne(ctx, node.client, out); err != nil {
			return fmt.Errorf("%s: %w", node.address, err)
		}
	}
	return nil
}

func describeOne(ctx context.Context, client *pion.Client, out io.Writer) error {
	server, err := client.Describe(ctx)
	if err != nil {
		return err
	}
	receipt, err := client.Stats(ctx)
	if err != nil && !errors.Is(err, pion.ReasonNotAllowed) { // it is the owner's, not a tenant's
		return err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	defer table.Flush()
	fmt.Fprintf(table, "version\t%s\nprefixes\t%d\nrows\t%d\nbytes on disk\t%d of %d\nattention\t%s\n",
		server.GetVersion(), server.GetPrefixCount(), server.GetRowCount(), server.GetDiskUsedBytes(),
		server.GetDiskBudgetBytes(), orElse(server.GetAttendBackend(), "off"))
	if receipt == nil {
		return nil
	}
	fmt.Fprintf(table, "hits\t%d\nmisses\t%d\ntokens served\t%d\nprefill avoided\t%.1f s, %.1f s of it measured\n",
		receipt.GetHits(), receipt.GetMisses(), receipt.GetTokensServed(), receipt.GetPrefillSecondsAvoided(),
		receipt.GetPrefillSecondsAvoidedMeasured())
	return nil
}

// get writes to a name beside the file; only what is complete takes the file's name.
func get(
	ctx context.Context, all nodes, name, file string, replace bool, out, notes io.Writer,
) (err error) {
	info, client, err := all.find(ctx, name)
	if err != nil {
		return err
	}
	if info.Fidelity != wire.RawFidelity {
		return fmt.Errorf("%q is stored with loss (%s): `pion-grpc export` writes it as it is", name, info.Fidelity)
	}
	if _, err := os.Lstat(file); err == nil && !replace {
		return fmt.Errorf("%s exists: -replace replaces it", file)
	}
	scratch, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*")
	if err != nil {
		return err
	}
	defer func() {
		scratch.Close()
		if err != nil {
			os.Remove(scratch.Name())
		}
	}()
	// With its end named, whatever parts are there come along, and cut nothing.
	request := pion.FetchRequest{Namespace: name, End: info.TokenCount}
	for _, part := range info.Parts {
		if part.BoundaryTokens == info.TokenCount {
			request.PartKinds = append(request.PartKinds, part.Kind)
		} else {
			fmt.Fprintf(notes, "pionctl: part %s.%d at %d tokens is left out: it is not the end\n", printable(part.Kind), part.Slot, part.BoundaryTokens)
		}
	}
	var writer *segment.Writer
	prefix, err := client.FetchTo(ctx, request, writing(func(data []byte) (int, error) { return writer.Write(data) }),
		func(announced *pion.Prefix) (err error) {
			writer, err = segment.NewWriter(scratch, segmentOf(announced))
			return err
		})
	if err != nil {
		return err
	}
	if !prefix.Hit {
		return fmt.Errorf("%q is not stored any more: %v", name, prefix.Reason)
	}
	if err := writer.Finish(prefix.TokenIDs); err != nil {
		return err
	}
	if err := errors.Join(scratch.Sync(), scratch.Close()); err != nil {
		return err
	}
	if err := os.Rename(scratch.Name(), file); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s: %d tokens, written to %s\n", printable(name), prefix.End, file)
	return nil
}

func segmentOf(announced *pion.Prefix) *segment.Segment {
	s := &segment.Segment{
		Rows: announced.End, Tokens: uint64(len(announced.TokenIDs)), Model: announced.Info.Model,
		Namespace: announced.Info.Namespace,
	}
	for _, tensor := range announced.Tensors {
		s.Layout = append(s.Layout, tensor.Layout)
	}
	for _, part := range announced.Parts {
		s.Parts = append(s.Parts, part.PartInfo)
	}
	return s
}

func put(ctx context.Context, client *pion.Client, file, name string, replace bool, out io.Writer) error {
	opened, err := os.Open(file)
	if err != nil {
		return err
	}
	defer opened.Close()
	facts, err := opened.Stat()
	if err != nil {
		return err
	}
	reader, err := segment.Open(opened, facts.Size())
	if err == nil {
		err = reader.Check() // as a whole, before its first byte is sent
	}
	if err != nil {
		return fmt.Errorf("%s: nothing was stored: %w", file, err)
	}
	request, err := reader.Request()
	if err != nil {
		return fmt.Errorf("%s: nothing was stored: %w", file, err)
	}
	request.Namespace = orElse(name, request.Namespace)
	request.Replace = replace
	request.Durability = pion.DurabilityDisk
	stored, err := client.Store(ctx, request)
	if err != nil {
		return err
	}
	what := "is stored, and on disk"
	if stored.AlreadyStored {
		what = "was stored already"
	}
	fmt.Fprintf(out, "%s: %d tokens; %s\n", printable(stored.Namespace), stored.TokenCount, what)
	return nil
}

// timed fetches into the same memory again and again, as a server that reuses its caches does.
func timed(ctx context.Context, all nodes, name, runs string, out io.Writer) error {
	count, err := strconv.Atoi(runs)
	if err != nil || count < 1 {
		return fmt.Errorf("%q is no number of times", runs)
	}
	_, client, err := all.find(ctx, name)
	if err != nil {
		return err
	}
	memory := map[string][]byte{}
	into := func(tensor wire.TensorLayout, size int) []byte {
		if len(memory[tensor.Name()]) < size {
			memory[tensor.Name()] = make([]byte, size)
		}
		return memory[tensor.Name()]
	}
	for range count {
		begun := time.Now()
		prefix, err := client.Fetch(ctx, pion.FetchRequest{Namespace: name, Into: into})
		if err != nil {
			return err
		}
		if !prefix.Hit {
			return fmt.Errorf("%q is not there any more: %v", name, prefix.Reason)
		}
		seconds := time.Since(begun).Seconds()
		fmt.Fprintf(out, "{\"bytes\": %d, \"seconds\": %.6f, \"mb_per_s\": %.1f}\n",
			prefix.TotalBytes, seconds, float64(prefix.TotalBytes)/1e6/seconds)
	}
	return nil
}

// writing is a function as a writer: what it writes to is known only when the prefix is announced.
type writing func(data []byte) (int, error)

func (w writing) Write(data []byte) (int, error) { return w(data) }

// printable keeps names from steering the terminal.
func printable(text string) string {
	return strings.Map(func(char rune) rune {
		if char < ' ' || (char >= 0x7f && char < 0xa0) {
			return '\ufffd'
		}
		return char
	}, text)
}

func orElse(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}
