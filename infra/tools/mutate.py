#!/usr/bin/env python3
"""Breaks each guard between tenants on purpose, one at a time, in a copy of the
committed tree, and checks that the test named beside it goes red.

    make mutate            all of them
    make mutate ONLY=scrub those whose name holds the word

Prints one line per fault and fails if a fault survives, or if a line to change
is no longer there. docs/isolation/mutations.md is this list for readers; a
fresh list is written with --write-docs.
"""

import os
import subprocess
import sys
import tempfile
import time

# name, what the fault is, file, text, replacement, package and tests
FAULTS = [
    ("scrub-skipped", "a page that changes its owner is not wiped", "engine/kv/scrub.go",
     "return g.state == StateDirty && (p.scrub == Always || g.owner != owner)", "return false", "./engine/kv", "Canary|Scrub"),
    ("scrub-one-page-too-few", "the last of the pages to wipe is left as it is", "engine/kv/holding.go",
     "for _, i := range wipe {\n\t\tp.wipe(i)", "for _, i := range wipe[:max(len(wipe)-1, 0)] {\n\t\tp.wipe(i)", "./engine/kv", "Canary|Scrub"),
    ("scrubbed-without-wipe", "a page counts as wiped ahead that was not", "engine/kv/scrub.go",
     "p.wipe(index) // nobody else can reach a page in this state", "_ = index", "./engine/kv", "Scrub"),
    ("scrub-takes-promised", "the scrubber takes pages that credits need", "engine/kv/scrub.go",
     "if !ok || p.promisable() < 1 {", "if !ok {", "./engine/kv", "Scrub"),
    ("quarantine-without-limit", "a pool full of quarantined pages still promises", "engine/kv/credits.go",
     "q := p.counts[StateQuarantined]; p.maxQuarantine > 0 && q > p.maxQuarantine", "q := 0; q > 0", "./engine/kv", "Quarantine"),
    ("cache-without-owner", "one owner finds the prompts of another", "engine/kv/cache.go",
     "node := c.roots[scope]\n", "node := c.roots[scope]\n\tfor s, n := range c.roots {\n\t\tif s.Model == scope.Model && s.Adapter == scope.Adapter {\n\t\t\tnode = n\n\t\t}\n\t}\n", "./engine/kv", "Recall|Cache"),
    ("cache-without-ids", "a page is found by its place alone", "engine/kv/cache.go",
     "next := node.children[idsOf(tokens, i)]\n\t\tif next == nil {\n\t\t\tbreak", "next := node.children[idsOf(tokens, i)]\n\t\tfor _, n := range node.children {\n\t\t\tnext = n\n\t\t}\n\t\tif next == nil {\n\t\t\tbreak", "./engine/kv", "Recall|Cache"),
    ("cached-page-not-held", "a page that is remembered can be freed under its user", "engine/kv/cache.go",
     "\t\tg.refs++\n\t\tout.lease", "\t\tout.lease", "./engine/kv", "Recall|Fill|Cache"),
    ("generation-ignored", "a handle of an older grant works", "engine/kv/holding.go",
     "if g.generation != r.Generation || g.owner != h.owner", "if g.owner != h.owner", "./engine/kv", "."),
    ("free-before-drain", "a page is freed although a writer has it open", "engine/kv/pool.go",
     "case g.writers > 0:", "case g.writers > 1<<20:", "./engine/kv", "."),
    ("free-under-reader", "a page is freed although a reader has it open", "engine/kv/pool.go",
     "case g.readers > 0:", "case g.readers > 1<<20:", "./engine/kv", "."),
    ("read-past-the-proof", "a pass resolves positions that nobody proved", "engine/kv/table.go",
     "if positions < 0 || positions > t.pos+t.count {", "if positions < 0 {", "./engine/kv", "."),
    ("tail-kept", "the tail of the last page is sealed as it is", "engine/kv/filler.go",
     "p.geometry.zeroTail(p.bytes(last.Index), tokens-(len(h.refs)-1)*p.geometry.PageTokens)", "_ = last", "./engine/kv ./engine/handoff", "."),
    ("digest-ignored", "decode commits pages with other bytes", "engine/kv/landing.go",
     "if subtle.ConstantTimeCompare(got.sum[:], want.Sum[:]) != 1 {", "if subtle.ConstantTimeCompare(got.sum[:], want.Sum[:]) > 1 {", "./engine/kv ./engine/handoff", "."),
    ("coverage-one-short", "decode commits one position less than claimed", "engine/kv/landing.go",
     "if tokens != c.Tokens {", "if tokens+1 < c.Tokens {", "./engine/kv ./engine/handoff", "."),
    ("tail-not-looked-at", "bytes behind the last position are accepted", "engine/kv/landing.go",
     "if !geo.tailClear(p.bytes(refs[last].Index), tokens-last*geo.PageTokens) {", "if last < 0 {", "./engine/kv", "."),
    ("sealed-page-of-another-grant", "the page server serves a page under another generation", "engine/kv/sealed.go",
     "if ref.Generation != e.Generation {", "if ref.Generation == 0 {", "./engine/kv ./engine/fabric", "."),
    ("digest-without-place", "the digest does not depend on the page's place", "engine/kv/digest.go",
     "return d.key.CopySum(dst, src, uint32(i), generation)", "return d.key.CopySum(dst, src, 0, generation)", "./engine/kv ./engine/handoff", "."),
    ("read-from-elsewhere", "pages may come from other pages than the manifest names", "engine/kv/landing.go",
     "if got.from != want.From {", "if false {", "./engine/kv ./engine/handoff", "."),
    ("page-left-out", "a fabric that leaves a page out is believed", "engine/kv/landing.go",
     "if ok && whole {", "if _, _ = ok, whole; true {", "./engine/kv", "."),
    ("late-store", "a reader that lives on can still write into pages", "engine/kv/landing.go",
     "case in.over:", "case false:", "./engine/kv", "."),
    ("transfer-not-compared", "a manifest of another transfer is taken", "engine/handoff/receiver.go",
     "case m.Transfer != e.Transfer:", "case false:", "./engine/handoff", "."),
    ("nonce-not-compared", "a manifest without this transfer's nonce is taken", "engine/handoff/receiver.go",
     "case m.Nonce != e.Nonce:", "case false:", "./engine/handoff", "."),
    ("owner-not-compared", "pages of another owner are taken", "engine/handoff/receiver.go",
     "case m.Owner != e.Owner:", "case false:", "./engine/handoff", "."),
    ("epoch-not-compared", "a manifest of a dead process is taken", "engine/handoff/receiver.go",
     "case m.PrefillEpoch != e.PrefillEpoch || m.DecodeEpoch != r.conf.Epoch:", "case false:", "./engine/handoff", "."),
    ("geometry-not-compared", "pages of another shape are taken", "engine/handoff/receiver.go",
     "case m.Geometry != r.conf.Geometry.Fingerprint():", "case false:", "./engine/handoff", "."),
    ("tokens-not-compared", "pages of other token ids are taken", "engine/handoff/receiver.go",
     "case m.TokenDigest != e.TokenDigest:", "case false:", "./engine/handoff", "."),
    ("version-not-compared", "a manifest of a version that was not agreed on is taken", "engine/handoff/receiver.go",
     "case m.Version != e.Version:", "case false:", "./engine/handoff", "."),
    ("early-pages-not-compared", "the manifest may name other pages than were pulled early", "engine/handoff/inbound.go",
     "|| len(refs) < have || !slices.Equal(refs[:have], before) {", "|| len(refs) < have || slices.Equal(refs, nil) {", "./engine/handoff", "."),
    ("finished-page-writable", "a page that others read already can be written", "engine/kv/table.go",
     "case g.state == StateSealed && i < t.firstWrite:", "case g.state == StateSealed:", "./engine/kv", "."),
    ("replay", "a transfer can be pulled twice", "engine/handoff/receiver.go",
     "if _, ok := r.seen[e.Transfer]; ok {", "if false {", "./engine/handoff", "."),
    ("range-secret-ignored", "the page server asks for no secret", "engine/fabric/server.go",
     "if !ok || !same {", "if _ = same; !ok {", "./engine/fabric", "."),
    ("recompute-ignored", "decode goes on although the last position differs", "engine/sched/decode.go",
     "\tif !same {\n\t\treturn ErrRecompute", "\tif _ = same; false {\n\t\treturn ErrRecompute", "./engine/sched ./engine/worker", "."),
    ("recompute-of-itself", "the last position is compared with itself", "engine/sched/wall_recompute.go",
     "return bytes.Equal(pulled, again)", "return bytes.Equal(again, again)", "./engine/sched ./engine/worker", "."),
    ("window-not-checked", "a pool smaller than the window is let in", "engine/worker/capacity.go",
     "|| pages < pagesFor(window, pageTokens) {", "{", "./engine/worker", "Capacity"),
    ("worker-checks-no-window", "a worker starts with a pool smaller than the window", "engine/worker/wall_capacity.go",
     "return CheckCapacity(role, pages, pageTokens, window)", "return nil", "./engine/worker", "."),
    ("registry-checks-no-window", "the front lets a pool smaller than the window in", "engine/pool/registry.go",
     "if err := r.opts.CheckCapacity(w.Role, w.Pages, w.PageTokens, w.Context); err != nil {", "if err := error(nil); err != nil {", "./engine/pool", "."),
    ("credits-beyond-the-pool", "what does not fit the pool gets credits", "engine/kv/credits.go",
     "if free := p.promisable(); pages > free {", "if free := p.promisable(); pages > free<<20 {", "./engine/kv ./engine/sched", "."),
    ("prompt-not-checked", "a prompt longer than the window is admitted", "services/gateway/request.go",
     "case prompt >= window:", "case prompt >= window<<20:", "./services/gateway", "RefusedBefore"),
    ("largest-leg-decides", "the edge goes by the leg that can hold most", "engine/pool/registry.go",
     "least == 0 || n < least {", "least == 0 || n > least {", "./engine/pool", "."),
    ("legs-not-asked", "the edge goes by the model and not by what legs can hold", "services/gateway/request.go",
     "live > 0 {", "live < 0 {", "./services/gateway", "."),
    ("counts-not-compared", "the gateway does not compare the token counts", "services/gateway/stream.go",
     "case int(prefill.GetTokens()) != edge || int(decode.GetTokens()) != edge:", "case false:", "./services/gateway", "Lying"),
    ("legs-not-compared", "the gateway compares nothing", "services/gateway/wall_counts.go",
     "return compare(edge, pair, prefill, decode)", "return nil", "./services/gateway", "Lying"),
    ("roots-not-compared", "the legs may name different manifests", "services/gateway/stream.go",
     "case len(prefill.GetManifestRoot()) != 32 || !bytes.Equal(prefill.GetManifestRoot(), decode.GetManifestRoot()):", "case false && bytes.Equal(nil, nil):", "./services/gateway", "Lying"),
    ("any-finish-reason", "an end that is not on the list is a success", "services/gateway/record.go",
     "case !ok || want != f.GetFinishReason():", "case !ok && want == \"x\":", "./services/gateway", "LyingEnds"),
    ("sum-without-length", "a page and a shorter one have one sum", "engine/mem/mem.go",
     "binary.LittleEndian.AppendUint64(in, uint64(h.n))", "binary.LittleEndian.AppendUint64(in, 0)", "./engine/mem", "."),
    ("sum-without-generation", "the sum does not depend on the grant", "engine/mem/mem.go",
     "binary.LittleEndian.PutUint64(nonce[4:], generation)", "_ = generation", "./engine/mem", "."),
    ("sum-of-the-source", "what is digested is not what is stored", "engine/mem/reference.go",
     "part, dst = dst[:n], dst[n:]", "dst = dst[n:]", "./engine/mem", "."),
    ("lane-without-key", "two lanes of the sum are one", "engine/mem/reference.go",
     "s3 += uint64(x+key[12]) * uint64(y+key[13])", "s3 += uint64(x+key[8]) * uint64(y+key[9])", "./engine/mem", "."),
    ("wipe-one-line-short", "the last line of a page is not wiped", "engine/mem/kernels.c",
     "if (whole) fill_far(dst, byte, whole);", "if (whole) fill_far(dst, byte, whole - 64);", "./engine/mem", "."),
    ("hold-ends-by-itself", "pages that a stopped reader has open are freed when the server ends", "engine/fabric/lend.go",
     "if errors.Is(err, errLost) {", "if false {", "./engine/fabric", "."),
    ("hold-ends-by-noise", "pages are freed because a reader said something else", "engine/fabric/lend.go",
     "if err == nil && kind == kindDone {", "if _ = kind; true {", "./engine/fabric", "."),
    ("loan-with-timeout", "pages are lent for so long only", "engine/fabric/lend.go",
     "l.SetReadDeadline(time.Time{}) != nil", "l.SetReadDeadline(l.now().Add(time.Minute)) != nil", "./engine/fabric", "."),
    ("closed-under-a-copy", "a client closes its connection while it copies", "engine/fabric/memory_linux.go",
     "if !x.keepOpen() {", "if false {", "./engine/fabric", "."),
    ("lent-without-hold", "pages that are lent can be granted", "engine/kv/loan_linux.go",
     "p.pages[r.Index].readers++", "_ = r", "./engine/kv ./engine/fabric", "Loan|Lend|Reader"),
    ("lent-of-another-grant", "pages are lent under another generation", "engine/kv/loan_linux.go",
     "if _, err := s.find(r); err != nil {", "if _, err := s.find(r); false {", "./engine/kv ./engine/fabric", "."),
    ("lent-without-secret", "pages are lent to whoever asks", "engine/fabric/lend.go",
     "s.find(req.read.transfer, req.read.secret)", "s.find(req.read.transfer, s.offers[req.read.transfer].secret)", "./engine/fabric", "."),
    ("offset-of-another-memory", "offsets are taken into memory that is not the server's", "engine/fabric/lend.go",
     "|| req.mem != c.hand.mem {", "{", "./engine/fabric", "."),
    ("offset-beyond-the-memory", "a page may lie beyond what is mapped", "engine/fabric/wire_memory.go",
     "if pageBytes > size || v > uint64(size-pageBytes) {", "if pageBytes > size {", "./engine/fabric", "BadServers"),
    ("memory-without-seals", "memory is mapped that can be cut off or written", "engine/fabric/handover_linux.go",
     "if seals&wantSeals != wantSeals {", "if seals < 0 {", "./engine/fabric", "."),
    ("memory-shared-for-writing", "prefill hands out its memory with the right to write", "engine/kv/loan_linux.go",
     "os.Open(fmt.Sprintf(\"/proc/self/fd/%d\", p.arena.fd))", "os.OpenFile(fmt.Sprintf(\"/proc/self/fd/%d\", p.arena.fd), os.O_RDWR, 0)", "./engine/kv", "Share"),
    ("token-good-for-ever", "a token buys the memory more than once", "engine/fabric/handover_linux.go",
     "delete(h.valid, t)", "_ = t", "./engine/fabric", "."),
    ("token-ignored", "memory is handed out without a token", "engine/fabric/handover_linux.go",
     "if !h.forget(t) {", "if h.forget(t); false {", "./engine/fabric", "."),
    ("memory-for-other-users", "the other end may be another user", "engine/fabric/handover_linux.go",
     "own := os.Geteuid(); u != own {", "own := os.Geteuid(); u < own {", "./engine/fabric", "."),
    ("done-without-answer", "a read returns while its pages are still held", "engine/fabric/memory_linux.go",
     "st, err := readPreamble(x.conn)", "st, err := uint16(0), error(nil)", "./engine/fabric", "LeavesNothing|BadServers"),
    ("window-not-wiped", "bytes of pages stay in the memory of a reader", "engine/fabric/window.go",
     "clear(v.buf)", "_ = v", "./engine/fabric", "Window"),
    ("unmapped-under-a-copy", "a client that is closed unmaps what a read copies", "engine/fabric/memory_linux.go",
     "if m.users--; m.users > 0 {", "if m.users--; m.users > 1 {", "./engine/fabric", "CloseDuringACopy"),
    ("history-not-chained", "a block of page history may follow on any other", "engine/history/block.go",
     " || h.Prev != l.Hash {", " {", "./engine/history", "Chain"),
    ("history-with-holes", "events may be missing between two blocks", "engine/history/block.go",
     " || h.FirstSeq != l.LastSeq+1 ", " ", "./engine/history", "Chain"),
    ("history-of-another-run", "a worker's history may hold blocks of another", "engine/history/block.go",
     "if h.Epoch != epoch || ", "if ", "./engine/history", "Chain"),
    ("history-in-two-forms", "two bodies say the same", "engine/history/body.go",
     "if !bytes.Equal(encodeBody(events), b) {", "if bytes.Equal(nil, b) {", "./engine/history", "OneForm"),
    ("history-header-believed", "the pages, times and grants in front are not compared", "engine/history/block.go",
     "if want != h {", "if false {", "./engine/history", "OneForm"),
    ("loss-unsaid", "events that were lost leave no gap", "engine/history/writer.go",
     "case first != 0:", "case false:", "./engine/history", "WriterOutage"),
    ("loss-begins-late", "the first event that is lost is not in the gap", "engine/history/writer.go",
     "w.gapFirst, w.gapLast = e.Seq, e.Seq\n", "w.gapFirst, w.gapLast = e.Seq+1, e.Seq+1\n", "./engine/history", "WriterOutage"),
    ("history-clock-set-back", "times of page history go back", "engine/history/writer.go",
     "if at.Before(w.last) {", "if false {", "./engine/history", "ClockSetBack"),
    ("history-delivery-without-bound", "an outage ends in one delivery of everything", "engine/history/writer.go",
     "&& size+len(w.pending[n]) <= w.most {", "{", "./engine/history", "Bounded"),
    ("history-of-others", "a worker can write the history of another", "engine/pool/registry.go",
     "id.FromBytes[id.Epoch](req.GetEpoch()); !ok || err != nil || claimed != epoch {\n\t\treturn nil, connect.NewError(connect.CodePermissionDenied, ErrEpoch)\n\t}\n\tif n",
     "id.FromBytes[id.Epoch](req.GetEpoch()); !ok || err != nil {\n\t\treturn nil, connect.NewError(connect.CodePermissionDenied, ErrEpoch)\n\t} else {\n\t\tepoch = claimed\n\t}\n\tif n", "./engine/pool", "AppendHistory"),
    ("history-rewritten", "a block that is stored can be delivered with another content", "audit/history/store.go",
     "if [32]byte(hash) != history.Hash(block) {", "if hash == nil {", "./audit/history", "Append"),
    ("history-columns-believed", "columns of page history are not compared with the blocks", "audit/history/store.go",
     "if !alike(", "if false && !alike(", "./audit/history", "Changed"),
    ("history-block-believed", "a look-up does not compare a block with its hash and place", "audit/history/lookup.go",
     "if err == nil && (h.Epoch", "if false && (h.Epoch", "./audit/history", "Changed"),
    ("owner-before-a-gap", "a previous owner is sure although events are lost", "audit/history/lookup.go",
     "if g[1] > t.LastSeq && g[0] < p.Tenures[i].FirstSeq {", "if g[1] == 0 {", "./audit/history", "Lookups"),
    ("owner-before-the-unknown", "a previous owner is sure although the grant is not recorded", "audit/history/lookup.go",
     "if !found || i == 0 && p.From != 1 {", "if _ = found; i == 0 && p.From != 1 {", "./audit/history", "Lookups|Past"),
    ("history-before-receipts", "deliveries of page history take all connections of receipts", "audit/history/store.go",
     "one: make(chan struct{}, 1)", "one: make(chan struct{}, 9)", "./audit/history", "OneDelivery"),
    ("page-map-for-every-worker", "a worker can ask another whose pages it has", "engine/worker/control.go",
     "if _, err := peer.Require(ctx, peer.IsGateway); err != nil {\n\t\treturn nil, c.w.refused(ctx, \"pages\"",
     "if _, err := peer.Require(ctx, peer.Anyone); err != nil {\n\t\treturn nil, c.w.refused(ctx, \"pages\"", "./engine/worker", "UnauthorisedPeers"),
    ("page-map-for-tenants", "a tenant's key shows whose pages are where", "services/rpc/scopes.go",
     "OperationsServiceListPagesProcedure: tenancy.ScopePlatform,", "OperationsServiceListPagesProcedure: tenancy.ScopeInference,", "./services/rpc", "."),
    ("page-map-with-whole-tags", "the page map shows whole owner tags", "services/rpc/operations.go",
     "b[:min(len(b), 4)]", "b", "./services/rpc", "ListPages"),
    ("tls-keeps-pages", "what TLS decrypted of pages stays in its memory", "engine/fabric/records.go",
     "\tfor _, b := range r.bodies {\n\t\tclear(b)\n", "\tfor _, b := range r.bodies {\n\t\t_ = b\n", "./engine/fabric", "Records"),
    ("connection-keeps-pages", "the last record of an exchange stays with the connection", "engine/fabric/client.go",
     "\t\twipe(conn)\n", "", "./internal/probe", "Left/f16_over"),
    ("scratch-kept", "activations, scores and logits of a pass stay in scratch", "engine/compute/compute.go",
     "\tfor _, b := range m.scratch {\n\t\tclear(b)\n", "\tfor _, b := range m.scratch {\n\t\t_ = b\n", "./engine/compute", "Scratch"),
    ("attention-kept", "keys and values that attention widened stay in scratch", "engine/compute/rows.inc",
     "    memset(tmp, 0, bk_attn_tmp(sh) * sizeof *tmp);\n", "", "./engine/compute", "Scratch"),
    ("logits-kept", "the logits of a run stay when it ends", "engine/sched/run.go",
     "\tclear(r.logits)\n", "", "./engine/sched", "OverwritesBuffers"),
    ("proof-kept", "the keys and values taken as proof stay", "engine/sched/decode.go",
     "\tclear(r.proof)\n\tr.proof, r.proved", "\tr.proof, r.proved", "./engine/sched", "OverwritesBuffers"),
    ("proof-kept-on-failure", "the keys and values taken as proof stay when a pass fails", "engine/sched/run.go",
     "\tclear(r.proof)\n", "", "./engine/sched", "OverwritesBuffers"),
    ("history-of-penalties-kept", "the ids that were drawn stay when a run ends", "engine/sched/run.go",
     "\tr.sampler.Close()\n", "", "./engine/sched", "OverwritesBuffers"),
    ("prompt-ids-kept", "the ids of a prompt stay when its call ends", "engine/worker/prefill.go",
     "\tdefer clear(tokens)\n", "", "./engine/worker", "IDsOfAPrompt"),
    ("limit-not-asked", "a request is admitted without a reservation", "services/gateway/gateway.go",
     "	if err != nil {\n\t\treturn nil, apperr.From(err)\n\t}\n\tpair, err := g.pick", "	if err != nil {\n\t\theld = new(quota.Reservation)\n\t}\n\tpair, err := g.pick", "./services/gateway", "RefusedBeforeAdmission"),
    ("reservation-kept", "what a request did not use does not go back", "services/gateway/stream.go",
     "defer s.held.Close()", "_ = s.held.Close", "./services/gateway", "ReservedReturnsToZero"),
    ("one-limit-of-many", "a request takes of a limit although another is full", "tenancy/quota/book.go",
     "if s == nil || s.avail < n.amount || s.over(now) {", "if s == nil || (s.avail < n.amount && n == needs[0]) || s.over(now) {", "./tenancy/quota", "AllOrNothing|Exact"),
    ("slices-lost-in-outage", "a replica gives back to a database that is away", "tenancy/quota/exchange.go",
     "if !hears && !b.stopped {", "if hears && !hears {", "./tenancy/quota", "Outage"),
    ("outage-is-a-refusal", "a limit that cannot be checked counts as reached", "tenancy/quota/exchange.go",
     "w.finish(nil, errUnavailable(err))", "w.finish(nil, b.refuse(w.needs, w.needs[0]))", "./tenancy/quota", "Outage"),
    ("known-forever", "limits are believed although changes may have been missed", "tenancy/quota/rules.go",
     "trusted := r.now().Sub(r.heard) < trustFor", "trusted := !r.heard.IsZero()", "./tenancy/quota", "Outage|Windows"),
    ("slot-not-given-back", "a slot of a concurrent limit counts as spent", "tenancy/quota/book.go",
     "case l.Meter == Concurrent: // it ends", "case l.Meter == \"\": // it ends", "./tenancy/quota", "AnySchedule|TestDeadReplica"),
    ("spent-and-given-back", "what was spent goes back as well", "tenancy/quota/slice.go",
     "p.amount-spent", "p.amount", "./tenancy/quota", "AnySchedule|Windows"),
    ("drained-twice", "what has flowed back is given back again", "tenancy/quota/slice.go",
     "s.refunded += max(unused-drained-1, 0)", "_ = drained\n\t\ts.refunded += unused", "./tenancy/quota", "Minute"),
    ("fence-ignored", "a replica reserves after its lease", "infra/replica/member.go",
     "return m.ended || m.opt.Now().Sub(m.renewed) >= FenceAfter", "return m.ended", "./infra/replica", "Fence"),
    ("dead-too-early", "replicas are declared dead right after an outage", "infra/replica/member.go",
     "now.Sub(m.steady) >= LeaseFor && ", "", "./infra/replica", "Outage|Recovery"),
    ("exchange-out-of-order", "an exchange that was given up comes true later", "migrations/00003_quota.sql",
     "AND ended_at IS NULL AND exchange < number;", "AND ended_at IS NULL;", "./tenancy/quota", "LateExchange"),
    ("limit-overdrawn", "slices are granted beyond the limit", "migrations/00003_quota.sql",
     "free := l.amount - b.used - b.held;", "free := l.amount - b.used;", "./tenancy/quota", "Exact"),
    ("dead-while-it-runs", "what a dead replica's requests still hold is given back", "migrations/00003_quota.sql",
     "pending := least(pending, greatest(s.held - spent_, 0));", "pending := 0;", "./tenancy/quota", "DeadReplica"),
    ("charged-twice", "a settlement that is written again is charged again", "audit/settle/write.go",
     "JOIN written USING (request_id) GROUP BY", "GROUP BY", "./audit/settle", "Charges"),
    ("limit-of-anybody", "a tenant changes the operator's limits", "migrations/00003_quota.sql",
     "CREATE POLICY app_drop  ON quota_limit FOR DELETE TO bulkhead_app USING (current_is_platform() OR (tenant = current_tenant() AND NOT platform));",
     "CREATE POLICY app_drop  ON quota_limit FOR DELETE TO bulkhead_app USING (true);", "./tenancy", "WhoSetsLimits"),
    ("token-any-algorithm", "a token may choose how it is checked", "tenancy/token/open.go",
     "if !slices.Contains(algs, h.alg) {", "if h.alg == \"\" {", "./tenancy/token", "AlgNone|HMAC"),
    ("token-key-of-any-kind", "a key checks signatures of another kind", "tenancy/token/jwk.go",
     "if kid != \"\" && k.id != kid || !k.fits(alg) {", "if kid != \"\" && k.id != kid {", "./tenancy/token", "OtherAlgorithm"),
    ("token-names-twice", "a token may say two things under one name", "tenancy/token/claims.go",
     "if json.Unmarshal(b, &c.all) != nil ||", "if json.Unmarshal(b, &c.all, jsontext.AllowDuplicateNames(true)) != nil ||", "./tenancy/token", "Duplicate"),
    ("token-brings-its-key", "header fields that point to keys are ignored", "tenancy/token/open.go",
     "if _, ok := fields[name]; ok {", "if _, ok := fields[name]; ok && name == \"\" {", "./tenancy/token", "EmbeddedKeys"),
    ("token-of-any-type", "a token that was made for something else is taken", "tenancy/token/open.go",
     "if !slices.Contains(types, h.typ) {", "if h.typ == \"x\" {", "./tenancy/token", "AttackType|AsIssuers|AsPlatforms"),
    ("token-of-any-size", "a token may be as long as it likes", "tenancy/token/limits.go",
     "MaxSize = 8 << 10", "MaxSize = 8 << 20", "./tenancy/token", "AttackSize"),
    ("token-signature-ignored", "the signature is not looked at", "tenancy/token/open.go",
     "if o.method.Verify(o.signed, o.sig, key) != nil {", "if o.method.Verify(o.signed, o.sig, key); false {", "./tenancy/token", "MixUp|CutCache"),
    ("token-issuer-by-likeness", "an issuer with a similar URL is taken", "tenancy/token/verifier.go",
     "if is.URL != t.issuer || !is.wants(t.claims)", "if !is.wants(t.claims)", "./tenancy/token", "IssuerMixUp"),
    ("token-keys-of-all-issuers", "a key of one issuer checks tokens of another", "tenancy/token/keys.go",
     "s, ok := r.sources.Get(issuer)", "s, ok := r.sources.Get(\"\")\n\tif !ok {\n\t\ts, ok = new(source), true\n\t\tr.sources.Add(\"\", s)\n\t}", "./tenancy/token", "IssuerMixUp"),
    ("token-required-ignored", "tenants that share an issuer are not told apart", "tenancy/token/issuer.go",
     "for name, value := range i.Claims.Required {\n\t\tv := c.find(name)", "for name, value := range map[string]string(nil) {\n\t\tv := c.find(name)", "./tenancy/token", "TenantMixUp"),
    ("token-first-tenant-wins", "a token of two tenants is of the first", "tenancy/token/verifier.go",
     "\t\tif found != nil {\n\t\t\treturn nil, refuse(ReasonAmbiguous)\n\t\t}", "\t\tif found != nil {\n\t\t\tbreak\n\t\t}", "./tenancy/token", "TenantMixUp"),
    ("token-audience-ignored", "a token for somebody else is taken", "tenancy/token/issuer.go",
     "if !slices.Contains(c.audience, i.Audience) {", "if len(c.audience) > 99 {", "./tenancy/token", "AttackAudience"),
    ("token-lives-for-ever", "a token may live for years", "tenancy/token/claims.go",
     "d <= 0 || d > lifetime {", "d <= 0 {", "./tenancy/token", "AttackTime|Forged"),
    ("token-from-the-future", "a token may be issued tomorrow", "tenancy/token/claims.go",
     "jwt.WithIssuedAt(), ", "", "./tenancy/token", "AttackTime|Forged"),
    ("token-flood-of-keys", "each unknown key id asks the issuer", "tenancy/token/keys.go",
     "(s.tried.IsZero() || pause <= 0)", "(s.tried.IsZero() || pause < time.Hour)", "./tenancy/token", "Flood"),
    ("token-keys-for-ever", "keys of an issuer that is down serve on", "tenancy/token/keys.go",
     "known := !s.at.IsZero() && age < keysServeFor", "known := !s.at.IsZero()", "./tenancy/token", "IssuerDown"),
    ("token-withdrawn-key", "a key that was withdrawn is not noticed", "tenancy/token/keys.go",
     "wait := key == nil || age >= keysWaitAfter && last == nil", "wait := key == nil", "./tenancy/token", "Rotation|Replaced"),
    ("token-outage-is-refusal", "an issuer that is down makes tokens bad", "tenancy/token/keys.go",
     "\treturn nil, cannotCheck(f.err, fetchEvery)", "\treturn nil, refuse(ReasonKey)", "./tenancy/token", "Outage|Down|Answers"),
    ("token-redirect-followed", "an issuer sends us wherever it likes", "tenancy/token/fetch.go",
     "return errRedirect }", "return nil }", "./tenancy/token", "Answers"),
    ("token-internal-address", "an issuer can be an internal service", "tenancy/token/fetch.go",
     "\t\treturn errInternal\n\t}}", "\t\treturn nil\n\t}}", "./tenancy/token", "Internal"),
    ("token-endless-answer", "what an issuer answers has no end", "tenancy/token/fetch.go",
     "\tresp.Body = http.MaxBytesReader(nil, resp.Body, maxDocument)\n", "", "./tenancy/token", "Answers"),
    ("token-cut-cache-key", "tokens that begin alike are one", "tenancy/token/verifier.go",
     "sha256.Sum256([]byte(raw))", "sha256.Sum256([]byte(raw[:len(raw)-min(len(raw), 60)]))", "./tenancy/token", "CutCache"),
    ("token-remembered-too-long", "a signature is remembered for ever", "tenancy/token/verifier.go",
     "if !now.Before(t.until) ||", "if", "./tenancy/token", "RememberedFor"),
    ("token-remembers-its-key", "a signature outlives the key", "tenancy/token/verifier.go",
     "fresh := t.key != key", "fresh := t.key == nil", "./tenancy/token", "Replaced"),
    ("token-of-any-issuer", "a token of an issuer with our key is one of the platform", "tenancy/token/mint.go",
     "t.inTime(PlatformIssuer,", "t.inTime(t.issuer,", "./tenancy/token", "AsPlatforms|Forged"),
    ("token-unknown-restriction", "a claim that restricts is ignored", "tenancy/token/mint.go",
     "if !slices.Contains(platformClaims, name) {", "if name == \"\" {", "./tenancy/token", "Forged"),
    ("token-keys-added-twice", "processes add different token keys to one file", "tenancy/keyfile_upgrade.go",
     "unix.Flock(int(old.Fd()), unix.LOCK_EX)", "unix.Flock(int(old.Fd()), unix.LOCK_SH)", "./tenancy", "AddedOnce"),
]

TOP = subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip()
DOCS = os.path.join(TOP, "docs/isolation/mutations.md")


def docs():
    out = ["# Faults on purpose\n",
           "Each line is a guard between tenants that `make mutate` removes, one at a time, in a copy of the tree; the tests",
           "beside it must then fail. The list lives in `infra/tools/mutate.py`, which also writes this page (`--write-docs`).\n",
           "| fault | what happens then | guard in | caught by |", "| --- | --- | --- | --- |"]
    for name, what, path, _, _, packages, _ in FAULTS:
        out.append(f"| {name} | {what} | `{path}` | {', '.join('`' + p[2:] + '`' for p in packages.split())} |")
    return "\n".join(out) + "\n"


def main():
    if "--write-docs" in sys.argv:
        os.makedirs(os.path.dirname(DOCS), exist_ok=True)
        with open(DOCS, "w") as f:
            f.write(docs())
        return 0
    only = os.environ.get("ONLY", "")
    survived = []
    with tempfile.TemporaryDirectory() as tmp:
        tree = os.path.join(tmp, "tree")
        subprocess.check_call(["git", "clone", "-q", TOP, tree])
        for name, what, path, old, new, packages, tests in FAULTS:
            if only not in name:
                continue
            file = os.path.join(tree, path)
            with open(file) as f:
                text = f.read()
            if text.count(old) != 1:
                print(f"GONE     {name}: the line to change stands {text.count(old)} times in {path}")
                survived.append(name)
                continue
            with open(file, "w") as f:
                f.write(text.replace(old, new))
            began = time.time()
            try:
                run = subprocess.run(["go", "test", "-count=1", "-timeout", "60s", "-run", tests, *packages.split()],
                                     cwd=tree, capture_output=True, text=True)
            finally:
                with open(file, "w") as f:
                    f.write(text)
            built = "[build failed]" not in run.stdout and "[setup failed]" not in run.stdout
            verdict = "caught" if run.returncode and built else "SURVIVED" if built else "BROKEN"
            if verdict != "caught":
                survived.append(name)
                print(run.stdout[-2000:], run.stderr[-2000:])
            print(f"{verdict:8} {name}: {what} ({time.time() - began:.1f} s)", flush=True)
    print(f"{len(survived)} not caught" if survived else "all caught")
    return 1 if survived else 0


sys.exit(main())
