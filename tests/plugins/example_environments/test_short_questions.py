import pytest

from roundhouse.environments.generated import position
from roundhouse.plugins.example_environments.short_questions import FAMILIES, OTHER_FAMILIES, ShortQuestions
from tests.gym.environments.playing import SPLITS, judge, message, prompt_of, rewards_of

QUESTIONS = ShortQuestions()
OTHERS = ShortQuestions(tuple(OTHER_FAMILIES), max_tokens=40)


def row_of(family: str, subject: str) -> dict:
    [problem] = [
        problem
        for split in SPLITS
        for problem in QUESTIONS.problems[split]
        if (problem.family, problem.subject) == (family, subject)
    ]
    return QUESTIONS.row(problem)


async def test_the_right_answer_and_no_other_is_rewarded_fully_in_every_family() -> None:
    count = 2 * len(QUESTIONS.problems["train"])
    assert set(await rewards_of(QUESTIONS, right=True, count=count)) == {1.0}
    assert set(await rewards_of(QUESTIONS, right=False, count=count)) == {0.2}
    assert set(await rewards_of(OTHERS, right=True, count=count)) == {1.0}
    assert set(await rewards_of(OTHERS, right=False, count=count)) == {0.0}


@pytest.mark.parametrize(
    ("family", "subject", "reply", "reward"),
    [
        ("capitals", "France", " PARIS. ", 1.0),
        ("capitals", "France", "The capital of France is Paris.", 1.0),
        ("capitals", "France", "Rome, Paris or Berlin", 0.2),
        ("capitals", "France", "Parisian", 0.2),
        ("capitals", "France", "", 0.2),
        ("capitals", "Guatemala", "Guatemala City", 1.0),
        ("capitals", "the United States", "Washington, D.C.", 1.0),
        ("colours", "an elephant", "Gray", 1.0),
        ("colours", "an elephant", "grey and white", 0.2),
        ("colours", "an orange", "An orange is orange.", 1.0),
        ("opposites", "big", 'The opposite of "big" is "small".', 1.0),
        ("opposites", "big", "big", 0.2),
        ("sums", "3+4", "3 + 4 = 7", 1.0),
        ("sums", "3+4", "3 + 4 = 8", 0.2),
        ("sums", "3+4", "7 8", 0.2),
        ("sums", "2+2", "2 + 2", 0.2),
        ("units", "metres are in 1 kilometre", "There are 1,000 metres in 1 kilometre.", 1.0),
        ("units", "metres are in 1 kilometre", "100 or 1000", 0.2),
    ],
)
async def test_one_answer_counts_and_a_list_of_guesses_does_not(
    family: str, subject: str, reply: str, reward: float
) -> None:
    verdict = await judge(QUESTIONS, row_of(family, subject), message(reply))
    assert verdict.reward == pytest.approx(reward)
    assert sum(verdict.reward_components.values()) == verdict.reward
    assert verdict.metrics["right"] == verdict.metrics[f"right_{family}"] == float(reward == 1.0)


async def test_an_answer_that_the_limit_cut_off_loses_the_part_for_its_end() -> None:
    cut = {"output": [message("The capital of France is Paris, which")], "status": "incomplete"}
    verdict = await QUESTIONS.verify(None, row_of("capitals", "France"), cut)
    assert verdict.reward_components == {"right": 0.8, "ended": 0.0}


async def test_only_the_answer_alone_is_exact() -> None:
    row = row_of("capitals", "France")
    assert (await judge(QUESTIONS, row, message("Paris."))).metrics["exact"] == 1.0
    assert (await judge(QUESTIONS, row, message("It is Paris."))).metrics["exact"] == 0.0


def test_questions_are_many_in_six_families_and_divided_by_the_digest_of_their_names() -> None:
    train, heldout = (QUESTIONS.problems[split] for split in SPLITS)
    assert len(train) >= 300
    assert len(heldout) >= 150
    assert {problem.family for problem in train} == {problem.family for problem in heldout} == set(FAMILIES)
    assert all(position(QUESTIONS.task_id(problem)) < 0.33 for problem in heldout)
    assert not {prompt_of(row) for row in QUESTIONS.tasks("train")} & {
        prompt_of(row) for row in QUESTIONS.tasks("heldout")
    }
    assert QUESTIONS.tasks("train")[0]["responses_create_params"]["max_output_tokens"] == 16
