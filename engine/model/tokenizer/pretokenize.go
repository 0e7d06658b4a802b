package tokenizer

import (
	"unicode"
	"unicode/utf8"
)

// scanner returns the length in bytes, at least 1, of the first word of a text
// that is not empty. Scanners stand for the regular expressions of the
// original tokenizers, which look ahead and so are beyond package regexp. Each
// reads at most a constant number of runs further than the word it returns, and
// what it reads in vain is a run that the next word takes whole, so that
// splitting is linear.
type scanner func(text string) int

// words splits text by the first scanner, each of its words by the second, and
// so on.
func words(split []scanner, text string, yield func(string)) {
	if len(split) == 0 {
		yield(text)
		return
	}
	for text != "" {
		n := split[0](text)
		words(split[1:], text[:n], yield)
		text = text[n:]
	}
}

// preTokenizer says how a kind of byte-level vocabulary splits text.
type preTokenizer struct {
	split      []scanner
	wholeWords bool // words that are tokens are not merged
	addBOS     bool // unless the file says otherwise
}

// preTokenizers holds the kinds by their names in GGUF files.
var preTokenizers = map[string]preTokenizer{
	"default":          {split: []scanner{scanPunctuation, scanGPT2, scanNumbers, scanThousands}},
	"gpt-2":            {split: []scanner{scanGPT2}},
	"smollm":           {split: []scanner{scanDigit, scanGPT2}},
	"llama-bpe":        {split: []scanner{scanLlama3}, wholeWords: true, addBOS: true},
	"llama3":           {split: []scanner{scanLlama3}, wholeWords: true, addBOS: true},
	"llama-v3":         {split: []scanner{scanLlama3}, wholeWords: true, addBOS: true},
	"qwen2":            {split: []scanner{scanQwen2}},
	"deepseek-r1-qwen": {split: []scanner{scanQwen2}},
}

// class sorts a character as the expressions do.
type class int

const (
	end class = iota // of the text
	space
	letter
	number
	other
)

// look returns the first character of text, its class and its length in bytes.
func look(text string) (r rune, c class, n int) {
	if text == "" {
		return 0, end, 0
	}
	r, n = utf8.DecodeRuneInString(text)
	switch {
	case unicode.IsSpace(r):
		c = space
	case unicode.IsLetter(r):
		c = letter
	case unicode.IsNumber(r):
		c = number
	default:
		c = other
	}
	return r, c, n
}

// run returns the length of the run of a class at the start of text.
func run(text string, want class) int {
	at := 0
	for {
		_, c, n := look(text[at:])
		if c != want {
			return at
		}
		at += n
	}
}

// scanGPT2: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
func scanGPT2(text string) int {
	if n := contraction(text, false); n > 0 {
		return n
	}
	_, c, n := look(text)
	at := 0
	if text[0] == ' ' {
		if _, next, _ := look(text[1:]); next != end && next != space {
			c, at = next, 1
		}
	}
	if c == space {
		return spaces(text, n)
	}
	return at + run(text[at:], c)
}

// spaces: \s+(?!\S)|\s+. The last space before a word belongs to the word, if
// there is more than that one; first is the length of the first space.
func spaces(text string, first int) int {
	n := run(text, space)
	if n == len(text) {
		return n
	}
	_, last := utf8.DecodeLastRuneInString(text[:n])
	if n == last {
		return first
	}
	return n - last
}

// scanLlama3: (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
func scanLlama3(text string) int { return scanWords(text, 3) }

// scanQwen2 is scanLlama3 with numbers of one digit.
func scanQwen2(text string) int { return scanWords(text, 1) }

func scanWords(text string, digits int) int {
	if n := contraction(text, true); n > 0 {
		return n
	}
	r, c, n := look(text)
	switch {
	case c == letter:
		return run(text, letter)
	case c == number:
		at := n
		for range digits - 1 {
			_, c, n := look(text[at:])
			if c != number {
				break
			}
			at += n
		}
		return at
	case r != '\r' && r != '\n':
		if k := run(text[n:], letter); k > 0 {
			return n + k
		}
	}
	at := 0
	if r == ' ' {
		at = 1
	}
	if k := run(text[at:], other); k > 0 {
		at += k
		for at < len(text) && (text[at] == '\r' || text[at] == '\n') {
			at++
		}
		return at
	}
	for i := run(text, space); i > 0; i-- {
		if text[i-1] == '\r' || text[i-1] == '\n' {
			return i
		}
	}
	return spaces(text, n)
}

// contraction returns the length of an English contraction at the start of
// text, 0 if there is none.
func contraction(text string, anyCase bool) int {
	if len(text) < 2 || text[0] != '\'' {
		return 0
	}
	lower := func(i int) byte {
		if i >= len(text) {
			return 0
		}
		if c := text[i]; anyCase && c >= 'A' && c <= 'Z' {
			return c + 'a' - 'A'
		}
		return text[i]
	}
	switch a, b := lower(1), lower(2); {
	case a == 's', a == 't', a == 'm', a == 'd':
		return 2
	case a == 'r' && b == 'e', a == 'v' && b == 'e', a == 'l' && b == 'l':
		return 3
	}
	return 0
}

// until returns the length of what comes before the first place in text where
// match gives a length, or that length if it is at the start.
func until(text string, match func(string) int) int {
	if n := match(text); n > 0 {
		return n
	}
	for at := 0; ; {
		_, _, n := look(text[at:])
		if at += n; at == len(text) || match(text[at:]) > 0 {
			return at
		}
	}
}

// scanDigit: \p{N}
func scanDigit(text string) int {
	return until(text, func(s string) int {
		if _, c, n := look(s); c == number {
			return n
		}
		return 0
	})
}

// scanNumbers: \p{N}+
func scanNumbers(text string) int {
	if n := run(text, number); n > 0 {
		return n
	}
	return until(text, func(s string) int {
		if _, c, n := look(s); c == number {
			return n
		}
		return 0
	})
}

// scanThousands: [0-9][0-9][0-9]
func scanThousands(text string) int {
	return until(text, func(s string) int {
		for i := range 3 {
			if i >= len(s) || s[i] < '0' || s[i] > '9' {
				return 0
			}
		}
		return 3
	})
}

// scanPunctuation: [\p{P}\$\+<=>\^~\|]+
func scanPunctuation(text string) int {
	one := func(s string) int {
		switch r, _, n := look(s); {
		case n == 0:
			return 0
		case unicode.IsPunct(r), r == '$', r == '+', r == '<', r == '=', r == '>', r == '^', r == '~', r == '|':
			return n
		}
		return 0
	}
	at := 0
	for {
		n := one(text[at:])
		if n == 0 {
			break
		}
		at += n
	}
	if at > 0 {
		return at
	}
	return until(text, one)
}
