"""torchvision's models as chains of their children, given alive, as a user would bring them."""

from collections.abc import Iterator

import torchvision.models as vision
from torch import nn

from benchmarks.architectures.rows import CLASSES


def unrolled(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a module whose children run one after the other; an nn.Sequential among them is opened too."""
    for child in module.children():
        if isinstance(child, nn.Sequential) and len(child) and type(child) is nn.Sequential:
            yield from unrolled(child)
        else:
            yield child


def _headed(model: nn.Module, *, pooled: nn.Module | None = None) -> nn.Sequential:
    """A model of features and a classifier between which torchvision's forward flattens."""
    *features, classifier = model.children()
    body = [block for part in features for block in (unrolled(part) if isinstance(part, nn.Sequential) else [part])]
    head = [*unrolled(classifier)] if isinstance(classifier, nn.Sequential) else [classifier]
    return nn.Sequential(*body, *([pooled] if pooled else []), nn.Flatten(), *head)


def resnet18() -> nn.Module:
    return _headed(vision.resnet18(num_classes=CLASSES))


def resnet50() -> nn.Module:
    return _headed(vision.resnet50(num_classes=CLASSES))


def resnext50() -> nn.Module:
    return _headed(vision.resnext50_32x4d(num_classes=CLASSES))


def mobilenet_v2() -> nn.Module:
    return _headed(vision.mobilenet_v2(num_classes=CLASSES), pooled=nn.AdaptiveAvgPool2d(1))


def mobilenet_v3() -> nn.Module:
    return _headed(vision.mobilenet_v3_large(num_classes=CLASSES))


def efficientnet_b0() -> nn.Module:
    return _headed(vision.efficientnet_b0(num_classes=CLASSES))


def convnext_tiny() -> nn.Module:
    model = vision.convnext_tiny(num_classes=CLASSES)
    return nn.Sequential(*unrolled(model.features), model.avgpool, *model.classifier)


def densenet121() -> nn.Module:
    model = vision.densenet121(num_classes=CLASSES)
    return nn.Sequential(*model.features, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier)


def vgg11_bn() -> nn.Module:
    return _headed(vision.vgg11_bn(num_classes=CLASSES))


def alexnet() -> nn.Module:
    return _headed(vision.alexnet(num_classes=CLASSES))


def squeezenet() -> nn.Module:
    model = vision.squeezenet1_1(num_classes=CLASSES)
    return nn.Sequential(*model.features, *model.classifier, nn.Flatten())


def shufflenet() -> nn.Module:
    return _headed(vision.shufflenet_v2_x1_0(num_classes=CLASSES), pooled=nn.AdaptiveAvgPool2d(1))


def mnasnet() -> nn.Module:
    model = vision.mnasnet1_0(num_classes=CLASSES)
    return nn.Sequential(*model.layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *model.classifier)


def regnet() -> nn.Module:
    model = vision.regnet_y_400mf(num_classes=CLASSES)
    return nn.Sequential(model.stem, *unrolled(model.trunk_output), model.avgpool, nn.Flatten(), model.fc)


def swin_t() -> nn.Module:
    model = vision.swin_t(num_classes=CLASSES)
    return nn.Sequential(*unrolled(model.features), model.norm, model.permute, model.avgpool, model.flatten, model.head)
