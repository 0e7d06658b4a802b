package chat

import (
	"crypto/sha256"
	"encoding/hex"
)

// listed are the templates that are served without an operator's word: the
// SHA-256 of the source, as it is in model files, and a name. Each has a golden
// test of its renders against jinja2, with conversations of system, user and
// assistant. Templates that need tools to render are not among them.
var listed = map[string]string{
	"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788": "SmolLM2",
	"0c3f266d86f93a1f50f1573648ba005cb9691ff176c2cfd7ca1a0a33fd7023ec": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
	"cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f": "Qwen-Qwen2.5-7B-Instruct",
	// The same for DeepSeek-R1-Distill-Qwen.
	"56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
	"ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6": "google-gemma-2-2b-it",
	"05549dad28b85aa1be36d9c625be27377b4101c115686830f79a994adb687822": "llama-cpp-deepseek-r1",
	"b2b7d1a2ff8344254daa5bc2f59a9182994806e94fdc191fe92b4a0693d8cb68": "meetkai-functionary-medium-v3.1",
	"5c7c96c27cfecf3418411d1ebd0d11d691ab6bd2155bb38dacc62250fe47c3c8": "meetkai-functionary-medium-v3.2",
	// The same for Llama 3.3.
	"e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65": "meta-llama-Llama-3.1-8B-Instruct",
	"5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4": "meta-llama-Llama-3.2-3B-Instruct",
	"78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90": "microsoft-Phi-3.5-mini-instruct",
	"e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272": "mistralai-Mistral-Nemo-Instruct-2407",
	// The models that the generator for tests makes.
	"4f05b98fc0a9dde9a39d4b6e17f3bf427b1eea5b95776755fd5d05cda72a3b35": "synthetic-turns",
	"61fbedab465ef2a7f1b123fc7e4bc06a995bd09ac381579affeda60f02ebd940": "synthetic-copy",
}

// Listed returns the name of a template that was reviewed, or "".
func Listed(src string) string {
	sum := sha256.Sum256([]byte(src))
	return listed[hex.EncodeToString(sum[:])]
}
