"""Games of TextArena by itself, as JSON: `python textarena_peer.py SEEDS`, in its own interpreter.

Each game is played with moves that a generator draws from a list; the transcript holds the rewards of all seats.
"""

import json
import random
import sys

import textarena

GAMES = {
    "GuessTheNumber-v0": (1, [f"[{number}]" for number in range(0, 22)]),
    "TicTacToe-v0": (2, [f"[{cell}]" for cell in range(9)]),
    "TowerOfHanoi-v0": (1, [f"[{a} {b}]" for a in "ABC" for b in "ABC"]),
    "FrozenLake-v0": (1, ["[up]", "[down]", "[left]", "[right]"]),
    "Blackjack-v0": (1, ["[Hit]", "[Stand]"]),
    "KuhnPoker-v0": (2, ["[check]", "[bet]", "[call]", "[fold]"]),
}


def play(game: str, players: int, moves: list[str], seed: int) -> dict:
    env = textarena.make(f"{game}-raw")
    env = textarena.wrappers.ActionFormattingWrapper(env)
    env.reset(num_players=players, seed=seed)
    drawn = random.Random(seed)
    transcript, done = [], False
    while not done and len(transcript) < 60:
        player, _ = env.get_observation()
        move = drawn.choice(moves)
        transcript.append((player, move))
        done, _ = env.step(action=move)
    rewards, _ = env.close()
    return {"moves": transcript, "done": done, "rewards": {str(key): value for key, value in (rewards or {}).items()}}


def main() -> None:
    seeds = int(sys.argv[1])
    found = {
        game: {"players": players, "moves": moves, "games": [play(game, players, moves, seed) for seed in range(seeds)]}
        for game, (players, moves) in GAMES.items()
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
