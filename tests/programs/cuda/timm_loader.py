"""timm's loader: batches of bytes, normalized on the device by a stream of its own."""

import torch
from timm.data.loader import PrefetchLoader, fast_collate


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        image = torch.randint(256, (3, 8, 8), generator=generator, dtype=torch.uint8)
        return image.numpy(), i


loader = PrefetchLoader(
    torch.utils.data.DataLoader(Images(), batch_size=4, collate_fn=fast_collate, pin_memory=True),
    device=torch.device("cuda"),
    img_dtype=torch.float32,
)
for images, targets in loader:
    print(images.shape, targets.tolist(), images.double().sum().item().hex())
