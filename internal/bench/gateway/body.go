package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"bulkhead.dev/engine/model/synth"
)

const (
	// bodyBytes is the size of a request.
	bodyBytes = 320
	// bodyCount is how many requests are told apart: enough that remembered
	// prompts are of no use, as between strangers.
	bodyCount = 1024
	// modelContext leaves room for every answer that is asked for.
	modelContext = 4096
)

// prose is what prompts are made of. Each of its words is a token of the model, as
// common words are for models that people use.
const prose = "please tell me in a few words how the old lighthouse keeper found his way home through the storm last night " +
	"when all the other people of the small town had gone to sleep and nobody was left to light the lamp for him again"

const system = "You are a helpful assistant."

// modelFile is a model of the smallest size with a vocabulary for prose.
func modelFile() []byte {
	words := []string{"system", "user", "assistant"}
	for _, w := range strings.Fields(prose + " " + system) {
		words = append(words, " "+w)
	}
	return synth.RandomLlama(1, synth.Shape{Layers: 1, Dim: 32, Heads: 1, KVHeads: 1, HeadDim: 32, Hidden: 32, Context: modelContext, Tied: true, Words: words})
}

// bodies are the requests of a load, all of bodyBytes bytes.
func (l load) bodies(model string) [][]byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	type request struct {
		Model     string    `json:"model"`
		MaxTokens int       `json:"max_tokens"`
		Stream    bool      `json:"stream"`
		Messages  []message `json:"messages"`
	}
	out := make([][]byte, bodyCount)
	for i := range out {
		make := func(text string) []byte {
			b, err := json.Marshal(request{model, l.tokens, l.stream, []message{{"system", system}, {"user", text}}})
			if err != nil { // strings and numbers always encode
				panic(err)
			}
			return b
		}
		text := fmt.Sprintf("%04d %s", i, prose)
		out[i] = make(text[:min(len(text), bodyBytes-len(make("")))])
	}
	return out
}
