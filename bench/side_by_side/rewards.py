"""The reward of the GRPO job: cheap, deterministic, and different from answer to answer."""


def share_of_letter_e(prompt: str, response: str, reference: object) -> float:
    return response.count("e") / max(1, len(response))
