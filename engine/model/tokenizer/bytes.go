package tokenizer

import "unicode/utf8"

// Byte-level vocabularies write each byte as one printable character: bytes
// that are printable in Latin-1 as themselves, the others as the characters
// from U+0100 on.

// firstShifted is the character of the first byte that is not printable.
const firstShifted = 0x100

// printable reports whether a byte stands for itself.
func printable(b byte) bool {
	return b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae
}

// byteRunes and runeBytes are the alphabet in both directions.
var byteRunes, runeBytes = func() (to [256]rune, from map[rune]byte) {
	from = make(map[rune]byte, len(to))
	next := rune(firstShifted)
	for b := range to {
		r := rune(b)
		if !printable(byte(b)) {
			r = next
			next++
		}
		to[b], from[r] = r, byte(b)
	}
	return to, from
}()

func byteRune(b byte) rune { return byteRunes[b] }

// fromAlphabet appends the bytes that a text in the byte alphabet stands for.
// Characters outside the alphabet stand for themselves.
func fromAlphabet(dst []byte, text string) []byte {
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		if b, ok := runeBytes[r]; ok {
			dst = append(dst, b)
		} else {
			dst = append(dst, text[i:i+n]...)
		}
		i += n
	}
	return dst
}
