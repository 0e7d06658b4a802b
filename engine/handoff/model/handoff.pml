/* The hand-off between a prefill and a decode worker, for exhaustive search by spin.
 *
 * Two requests of two owners share a prefill pool and a decode pool of PAGES pages each, so pages change owners while
 * the other request is anywhere in its life. One page stands for all pages of a request. Bytes are abstracted to
 * (owner, generation) of whoever wrote them; a digest that verifies is content that equals what was offered.
 *
 * Faults, each possible at every step: the gateway aborts a request on either leg; the offer is lost or arrives twice;
 * a read is served late, after the offer was withdrawn or the page given back; the prefill process dies.
 *
 * The states of a page and the steps between them are those of the code: pages.pml is written out of kv.Transitions,
 * and a step that the table does not have is an error.
 *
 * What is claimed (asserts):
 *   1  a page is granted only when nobody reads or writes it;
 *   2  a page that changes its owner was scrubbed before the new owner has it;
 *   3  decode commits only content of its own owner that prefill sealed for this very transfer;
 *   4  a transfer is committed at most once;
 *   5  at the end every page is free, and nobody holds one (no leak, no deadlock).
 *
 * Not modelled: several pages of a request, coverage of a partial page (kv.coverage has tests of its own), the death of
 * decode (its memory dies with it, and prefill's pages go back by the same abort), time.
 */
#include "pages.pml"

#define N 2                     /* requests; request r belongs to owner r + 1 */
#ifndef PAGES
#define PAGES 1                 /* pages of each pool; with one, each page changes its owner */
#endif
#define NONE 255

typedef page { byte state; byte owner; byte gen; byte holds; byte content; byte cgen; }
#define SRC 0                   /* pages 0..PAGES-1 are prefill's, */
#define DST PAGES               /* the others decode's */
page pg[2 * PAGES];
byte grants = 1;                /* one generation counter stands for both pools: it only has to grow */

#define FREE(p) (pg[p].state == clean || pg[p].state == dirty)

typedef request { bool aborted; bool committed; bool offered; }
request req[N];
bool dead = false;              /* the prefill process */

chan offer[N] = [2] of { byte, byte };        /* page, generation */
chan ack[N] = [1] of { bool };                /* true: committed */
chan ask[N] = [1] of { byte, byte };          /* a read: page, generation */
chan data[N] = [1] of { byte, byte, bool };   /* content, its generation, served */

inline grant(pool, p, who, then) {
    atomic {
        p = NONE;
        if
        :: FREE(pool) -> p = pool
        :: FREE(pool + PAGES - 1) -> p = pool + PAGES - 1
        :: !FREE(pool) && !FREE(pool + PAGES - 1) -> skip
        fi;
        if
        :: p != NONE ->
            assert(pg[p].holds == 0);                                    /* 1 */
            step(p, op_grant);
            if
            :: pg[p].owner != who -> pg[p].content = 0                   /* scrub on owner change */
            :: else -> skip
            fi;
            assert(pg[p].content == 0 || pg[p].owner == who);            /* 2 */
            pg[p].owner = who; pg[p].gen = grants; grants++;
            step(p, then)
        :: else -> skip
        fi
    }
}

/* Gives a page back: free at once, or quarantined until its last hold closes. */
inline release(p) {
    atomic {
        if
        :: pg[p].holds == 0 -> step(p, op_free)
        :: else -> step(p, op_quarantine)
        fi
    }
}
inline unhold(p) {
    atomic {
        pg[p].holds--;
        if
        :: pg[p].holds == 0 && pg[p].state == quarantined -> step(p, op_clear)
        :: else -> skip
        fi
    }
}

/* The page server of prefill: a read is served while the offer stands and the generation is right, under a hold. */
proctype Server(byte r) {
    byte p, g;
end:
    do
    :: ask[r]?p, g ->
        if
        :: atomic { !dead && req[r].offered && pg[p].state == sealed && pg[p].gen == g && pg[p].owner == r + 1 -> pg[p].holds++ };
            data[r]!pg[p].content, pg[p].cgen, true;                       /* as slow as it likes */
            unhold(p)
        :: else -> data[r]!0, 0, false
        fi
    od
}

proctype Prefill(byte r) {
    byte p;
    bool ok;
    do
    :: grant(SRC, p, r + 1, op_fill); if :: p != NONE -> break :: p == NONE && (req[r].aborted || dead) -> goto gone :: else -> skip fi
    od;
    atomic { pg[p].holds++ };
    pg[p].content = r + 1; pg[p].cgen = pg[p].gen;                        /* fill */
    unhold(p);
    if
    :: req[r].aborted -> goto back
    :: else -> skip
    fi;
    atomic { step(p, op_seal); req[r].offered = true };                      /* seal and offer */
    if
    :: offer[r]!p, pg[p].gen                                                /* arrives */
    :: offer[r]!p, pg[p].gen; offer[r]!p, pg[p].gen                        /* arrives twice */
    :: req[r].aborted = true                                                 /* lost: the call fails, the gateway aborts */
    fi;
    do
    :: ack[r]?ok -> break
    :: req[r].aborted || dead -> break                                       /* an abort never waits for a timeout */
    od;
    req[r].offered = false;                                                  /* withdrawn before the page goes back */
back:
    release(p);
gone:
    skip
}

proctype Decode(byte r) {
    byte p, sp, sg, c, cg;
    bool served;
    p = NONE;
    do
    :: offer[r]?sp, sg -> break
    :: req[r].aborted -> goto done
    od;
again:
    do
    :: grant(DST, p, r + 1, op_land); if :: p != NONE -> break :: p == NONE && req[r].aborted -> goto done :: else -> skip fi
    od;
    atomic { pg[p].holds++ };                                                /* only the fabric writes it now */
    ask[r]!sp, sg;
    data[r]?c, cg, served;                                                   /* the read has ended, however */
    pg[p].content = c; pg[p].cgen = cg;
    unhold(p);
    if
    :: served && c == r + 1 && cg == sg && !req[r].aborted ->                /* digest, generation, owner */
        atomic {
            assert(pg[p].content == r + 1 && pg[p].cgen == sg);              /* 3 */
            assert(!req[r].committed);                                       /* 4 */
            step(p, op_adopt);
            req[r].committed = true
        };
        if :: ack[r]!true :: req[r].aborted || dead -> skip fi
    :: else -> req[r].aborted = true
    fi;
done:
    if
    :: p != NONE -> release(p)
    :: else -> skip
    fi;
enddrain:
    do
    :: offer[r]?_, _ -> skip                                                 /* a replay, or too late: refused */
    od
}

/* The gateway may abort at any time, or never. */
proctype Gateway(byte r) {
    if
    :: req[r].aborted = true
    :: skip
    fi
}

/* The prefill process may die at any time: its requests are aborted (it was reaped, which is proof). */
proctype Reaper() {
    if
    :: atomic { dead = true; req[0].aborted = true; req[1].aborted = true }
    :: skip
    fi
}

init {
    byte i;
    atomic {
        for (i : 0 .. N - 1) { run Server(i); run Prefill(i); run Decode(i); run Gateway(i) }
        run Reaper()
    }
    /* 5: when nothing can move any more */
    timeout ->
    for (i : 0 .. 2 * PAGES - 1) {
        assert(FREE(i) && pg[i].holds == 0)
    }
}
