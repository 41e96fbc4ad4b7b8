package pion

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// TLSFromFiles returns a configuration that trusts the authorities of a PEM file (empty: the system's)
// and shows the certificate of another two (empty: none). The certificate is read anew for every
// connection, so that a renewed one needs no restart. The authorities are read once: Options.TLSFiles
// reads them anew as well.
func TLSFromFiles(authorities, certificate, key string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS13}
	if authorities != "" {
		text, err := os.ReadFile(authorities)
		if err != nil {
			return nil, fmt.Errorf("pion: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("pion: %s holds no certificate", authorities)
		}
	}
	if (certificate == "") != (key == "") {
		return nil, fmt.Errorf("pion: a certificate (%q) and its key (%q) go together", certificate, key)
	}
	if certificate != "" {
		if _, err := tls.LoadX509KeyPair(certificate, key); err != nil {
			return nil, fmt.Errorf("pion: %w", err)
		}
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(certificate, key)
			return &pair, err
		}
	}
	return config, nil
}

// TLSFiles are PEM files: the authorities that are trusted (empty: the system's), and the certificate that is
// shown and its key (empty: none).
type TLSFiles struct{ Authorities, Certificate, Key string }

func (o *Options) credentials() (credentials.TransportCredentials, error) {
	switch {
	case o.TLS != nil && o.TLSFiles != nil:
		return nil, fmt.Errorf("pion: either TLS or TLSFiles")
	case o.TLS != nil:
		return credentials.NewTLS(o.TLS), nil
	case o.TLSFiles != nil:
		first, err := o.TLSFiles.credentials()
		if err != nil {
			return nil, err
		}
		return rereading{first, *o.TLSFiles}, nil
	}
	return insecure.NewCredentials(), nil
}

func (f TLSFiles) credentials() (credentials.TransportCredentials, error) {
	config, err := TLSFromFiles(f.Authorities, f.Certificate, f.Key)
	if err != nil {
		return nil, err
	}
	return credentials.NewTLS(config), nil
}

// rereading are credentials that are read for each connection.
type rereading struct {
	credentials.TransportCredentials
	files TLSFiles
}

func (r rereading) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	now, err := r.files.credentials()
	if err != nil {
		return nil, nil, err
	}
	return now.ClientHandshake(ctx, authority, conn)
}

func (r rereading) Clone() credentials.TransportCredentials {
	return rereading{r.TransportCredentials.Clone(), r.files}
}
