from grading import same

from roundhouse.plugins.nexrl import BaseEvaluationTarget, EvaluationRunResult, Evaluator


class QuizEvaluator(Evaluator):
    def evaluate(self, data, evaluation_target: BaseEvaluationTarget) -> EvaluationRunResult:
        right = same(evaluation_target.final_answer, data["ground_truth"])
        return EvaluationRunResult(
            reward=float(right),
            ground_truth=data["ground_truth"],
            metrics={"answer_length": float(len(evaluation_target.final_answer))},
            extra_info={"asked": data["question"]},
        )
