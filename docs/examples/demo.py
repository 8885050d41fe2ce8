"""Three completions and one chat turn: `python docs/examples/demo.py MODEL` (a GGUF file, a folder or a hub name).

The backend is the best usable one; `TARGET_DEVICE=NAME` names another.
"""

import sys

from pagefleet import LLM, BackendError, SamplingParams


def main() -> None:
    prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100)

    try:
        llm = LLM(model=sys.argv[1])
    except BackendError as error:
        sys.exit(f"error: {error}")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        if output.error:
            sys.exit(f"error: {output.error}")
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}\n")

    messages = [{"role": "user", "content": "What is gravity?"}]
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60))
    print(f"User: {messages[0]['content']}\nAssistant: {answer.outputs[0].text}")


if __name__ == "__main__":
    main()
