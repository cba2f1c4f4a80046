"""A dataset whose __getitem__ computes in Python, read by the main process."""

import pretend_gpu


class Pictures:
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return self.decode(index)

    def decode(self, index):
        return sum((index * n) % 7 for n in range(600_000))  # guilty


def main():
    data = Pictures()
    while True:
        for index in range(len(data)):
            data[index]
            pretend_gpu.run(0.005)


main()
