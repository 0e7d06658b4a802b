// Package fabrictest has the suite that every fabric must pass, and a reader
// that injects faults.
package fabrictest

import (
	"context"
	"fmt"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/infra/id"
)

// Fault is something that can go wrong on the way.
type Fault int

// The faults.
const (
	// None lets everything through.
	None Fault = iota
	// FlipBit changes one bit of the last page.
	FlipBit
	// ShortRead delivers the second half of the last page as zeros, and says
	// nothing.
	ShortRead
	// SkipPage leaves the last page out, and says nothing.
	SkipPage
	// SwapPages delivers the first two pages in each other's place.
	SwapPages
	// WrongPage delivers the first page again in place of the last.
	WrongPage
	// StaleGeneration asks for a generation that was never granted.
	StaleGeneration
	// DieMidway delivers the first half and breaks.
	DieMidway
	// WrongSecret shows another secret.
	WrongSecret
	// WrongTransfer names another transfer.
	WrongTransfer
)

// Faulty is a reader that passes everything on but for one fault.
type Faulty struct {
	fabric.Reader
	Fault Fault
	// Before, if set, is called before pages are read: the place for tests to
	// do something meanwhile.
	Before func()
}

// ReadPages implements fabric.Reader.
func (f Faulty) ReadPages(ctx context.Context, transfer id.Transfer, secret fabric.Secret, refs []fabric.PageRef, into fabric.Sink) error {
	if f.Before != nil {
		f.Before()
	}
	last := len(refs) - 1
	sent := append([]fabric.PageRef(nil), refs...)
	to := into
	switch f.Fault {
	case SkipPage:
		sent = sent[:last]
	case SwapPages:
		sent[0], sent[1] = sent[1], sent[0]
	case WrongPage:
		sent[last] = sent[0]
	case StaleGeneration:
		sent[last].Generation += 1000
	case DieMidway:
		sent = sent[:len(sent)/2]
	case WrongSecret:
		secret[31] ^= 1
	case WrongTransfer:
		transfer[0] ^= 1
	case ShortRead, FlipBit:
		to = Each{into, func(i int, page []byte) ([]byte, error) {
			if i == last && f.Fault == FlipBit {
				page[len(page)/2] ^= 0x10
			} else if i == last {
				clear(page[len(page)/2:])
			}
			return page, nil
		}}
	}
	if len(sent) > 0 {
		if err := f.Reader.ReadPages(ctx, transfer, secret, sent, to); err != nil {
			return err
		}
	}
	if f.Fault == DieMidway {
		return fmt.Errorf("%w: died midway", fabric.ErrBroken)
	}
	return nil
}
