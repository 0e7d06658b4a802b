package handoff

// Computed by another program out of the description of the encodings.
const (
	goldenRoot   = "db7bede9973fbfe6e19072567628cff6b25064e7cf2141096b01a4e73ef8ea13"
	goldenTokens = "4c9d19fc2a24fc318716a8aed126471cc2940213d6dc018255f72fc2350da3ad"
)
