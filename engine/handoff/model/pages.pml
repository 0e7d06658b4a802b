/* Written out of kv.Transitions by this package's test (BULKHEAD_WRITE=1); not by hand. */
#define clean 0
#define dirty 1
#define granted 2
#define filling 3
#define reading 4
#define sealed 5
#define quarantined 6
#define scrubbing 7
#define op_grant 0
#define op_fill 1
#define op_land 2
#define op_seal 3
#define op_commit 4
#define op_adopt 5
#define op_free 6
#define op_quarantine 7
#define op_clear 8
#define op_scrub 9
#define op_scrubbed 10
inline step(p, op) {
    if
    :: pg[p].state == clean && op == op_grant -> pg[p].state = granted
    :: pg[p].state == dirty && op == op_grant -> pg[p].state = granted
    :: pg[p].state == granted && op == op_fill -> pg[p].state = filling
    :: pg[p].state == granted && op == op_land -> pg[p].state = reading
    :: pg[p].state == granted && op == op_quarantine -> pg[p].state = quarantined
    :: pg[p].state == filling && op == op_seal -> pg[p].state = sealed
    :: pg[p].state == filling && op == op_free -> pg[p].state = dirty
    :: pg[p].state == filling && op == op_quarantine -> pg[p].state = quarantined
    :: pg[p].state == reading && op == op_commit -> pg[p].state = sealed
    :: pg[p].state == reading && op == op_adopt -> pg[p].state = filling
    :: pg[p].state == reading && op == op_free -> pg[p].state = dirty
    :: pg[p].state == reading && op == op_quarantine -> pg[p].state = quarantined
    :: pg[p].state == sealed && op == op_free -> pg[p].state = dirty
    :: pg[p].state == sealed && op == op_quarantine -> pg[p].state = quarantined
    :: pg[p].state == quarantined && op == op_clear -> pg[p].state = dirty
    :: pg[p].state == dirty && op == op_scrub -> pg[p].state = scrubbing
    :: pg[p].state == scrubbing && op == op_scrubbed -> pg[p].state = clean
    :: else -> assert(false)
    fi
}
