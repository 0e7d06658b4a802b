package sim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"bulkhead.dev/engine/handoff"
)

// fault is something that goes wrong in a schedule.
type fault string

// The faults of messages, of reads, of announcements and manifests, and those
// that can hit at every step.
const (
	noFault      fault = ""
	loseRequest  fault = "request lost"
	loseReply    fault = "reply lost"
	duplicate    fault = "delivered twice"
	late         fault = "delivered late"
	reorder      fault = "preview overtaken"
	flipManifest fault = "bit flipped in a manifest"
	flipPreview  fault = "bit flipped in a preview"
	flipRoot     fault = "bit flipped in a root"

	flipPage    fault = "bit flipped in a page"
	wrongPage   fault = "another page"
	swapPages   fault = "pages swapped"
	skipPage    fault = "page left out"
	shortRead   fault = "page cut short"
	dieMidway   fault = "read broke off"
	lateStore   fault = "read broke off and stored on"
	staleRef    fault = "another generation asked for"
	wrongSecret fault = "wrong secret"

	shortCredits fault = "credits too few"
	otherOwner   fault = "announced for another owner"
	otherModel   fault = "announced for another model"
	otherVersion fault = "announced in an unknown version"
	noTokens     fault = "announced without tokens"
	versionSkew  fault = "offered in another version"
	otherTokens  fault = "computed from other tokens"

	closeInbound fault = "decode leg gave up"
	abortOffer   fault = "prefill leg gave up"
	abortFiller  fault = "prefill pages given up"
	staleSource  fault = "source granted again"
	releaseOpen  fault = "released in a pass"
	killPrefill  fault = "prefill worker died"
	killDecode   fault = "decode worker died"
	replayOld    fault = "old manifest replayed"
	replayOther  fault = "old manifest for a new transfer"
	replayForged fault = "old manifest with the ids of a new transfer"
)

var (
	messageFaults  = []fault{loseRequest, loseReply, duplicate, late}
	readFaults     = []fault{flipPage, wrongPage, swapPages, skipPage, shortRead, dieMidway, lateStore, staleRef, wrongSecret}
	announceFaults = []fault{shortCredits, otherOwner, otherModel, otherVersion, noTokens}
	metaFaults     = []fault{versionSkew, otherTokens}
	stepFaults     = []fault{closeInbound, abortOffer, abortFiller, staleSource, killPrefill, killDecode, replayOld, replayOther, replayForged}
)

func allFaults() []fault {
	return slices.Concat(messageFaults, readFaults, announceFaults, metaFaults, stepFaults,
		[]fault{reorder, releaseOpen, flipManifest, flipPreview, flipRoot})
}

// pick decides whether one of these faults is injected.
func (a *actor) pick(times float64, kinds ...fault) fault {
	if !a.chance(a.w.rate * times) {
		return noFault
	}
	return kinds[a.IntN(len(kinds))]
}

// injected counts a fault and notes that it hit a transfer.
func (w *world) injected(a *actor, r *transfer, where string, f fault) {
	w.note(a, "FAULT %s at %s", f, where)
	w.mu.Lock()
	w.tally.faults[f]++
	w.tally.steps[where+": "+string(f)]++
	w.mu.Unlock()
	if r != nil {
		r.mu.Lock()
		r.faulted = true
		r.mu.Unlock()
	}
}

// step passes some time, maybe injects a fault, and checks. It returns whether
// the worker, if one is given, still lives.
func (a *actor) step(l *life, r *transfer, where string) bool {
	a.sleep(3 * time.Millisecond)
	a.w.note(a, "%s", where)
	a.w.mu.Lock()
	a.w.tally.visits[where]++
	a.w.mu.Unlock()
	if f := a.pick(1, stepFaults...); f != noFault && a.w.hit(a, r, f) {
		a.w.injected(a, r, where, f)
		a.sleep(time.Microsecond) // until everybody knows
	}
	a.w.check(a)
	return l == nil || !l.dead()
}

// hit does what a step fault says, if there is something to do it to.
func (w *world) hit(a *actor, r *transfer, f fault) bool {
	switch f {
	case closeInbound:
		return r.close()
	case abortOffer:
		return r.each(func(u *leg) { u.aborted = true }, func(u *leg) { u.offer.Abort() })
	case abortFiller:
		return r.each(nil, func(u *leg) { u.filler.Abort() })
	case staleSource:
		return r.each(func(u *leg) { r.staled = true }, func(u *leg) {
			for _, s := range u.sealed() {
				s.Release()
			}
			u.filler.Abort()
			w.intrude(a, u.life)
		})
	case killPrefill:
		return w.kill(a, r.slot)
	case killDecode:
		return w.kill(a, w.decode)
	case replayOld, replayOther, replayForged:
		return w.send(a, r, f)
	}
	return false
}

// tally counts what happened.
type tally struct {
	schedules, transfers, commits, acks, busy, clean int
	refusals                                         map[handoff.Reason]int
	faults                                           map[fault]int
	steps                                            map[string]int // faults by step and kind
	visits                                           map[string]int // by step
}

func newTally() *tally {
	return &tally{refusals: map[handoff.Reason]int{}, faults: map[fault]int{}, steps: map[string]int{}, visits: map[string]int{}}
}

func (t *tally) add(o *tally) {
	t.schedules += o.schedules
	t.transfers += o.transfers
	t.commits += o.commits
	t.acks += o.acks
	t.busy += o.busy
	t.clean += o.clean
	sum(t.refusals, o.refusals)
	sum(t.faults, o.faults)
	sum(t.steps, o.steps)
	sum(t.visits, o.visits)
}

func sum[K comparable](to, from map[K]int) {
	for k, n := range from {
		to[k] += n
	}
}

func (t *tally) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d schedules, %d transfers (%d found no room), %d commits, %d acknowledged, %d without a fault\n",
		t.schedules, t.transfers, t.busy, t.commits, t.acks, t.clean)
	list(&b, "refusals", t.refusals)
	list(&b, "faults", t.faults)
	return b.String()
}

func list[K ~string](b *strings.Builder, what string, m map[K]int) {
	fmt.Fprintf(b, "%s:", what)
	for i, k := range slices.Sorted(maps.Keys(m)) {
		if i > 0 {
			b.WriteString(",")
		}
		fmt.Fprintf(b, " %s %d", k, m[k])
	}
	b.WriteString("\n")
}
