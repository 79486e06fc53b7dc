#!/usr/bin/env bash
# Counts the instances of products: kernels, one for each set of template arguments and source file, that multiply weights
# with rows of activations. Every kernel counts that is not listed as something else below.
#
#   scripts/count_instances.sh [--list] [BUILD]    BUILD: where a build with CUDA is (build)
#
# --list: also each of them with its source file. Exit 0: at most kMost; 1: more, or no kernels found; 77: a build without
# CUDA. What chooses among them: ggml-like/cuda/variants.h.
set -euo pipefail
kMost=106  # 11 of them end in sums over ranks, which would be kernels of their own else; 8 are FP8 by warpgroups
list=no
[ "${1:-}" = --list ] && { list=yes; shift; }
build=${1:-build}
objects=$build/CMakeFiles/quern_cuda.dir
[ -d "$objects" ] || { echo "SKIPPED: no objects of CUDA files in $build; instances were not counted"; exit 77; }

# Attention and the delta rule; choices, sums, also over ranks, norms, copies, packing, drafts.
others='attention_\w+_kernel(<[\w, ]+>)?
block_\w+_kernel(<\d+>)?
(concat_kernel|kv_write_kernel)
delta::\w+(<[\w, ]+>)?
(choose_many|choose_and_group|group_many)
(layer_norm_kernel|add_bias_kernel<\w+>|patch_values_kernel|grid_\w+_kernel)
(add_answer_terms<\d+>|add_prompt_terms(_of_ranks)?<[\w, ]+>|down_fp4_sum|down_fp4_sum_of_ranks|defer_kernel|mtp_rows_kernel)
(embed_kernel<\w+>|gather_kernel|top_kernel|best_token_kernel|write_ring_kernel)
(accept_drafts_kernel|follow_choice_kernel|follow_draft_kernel)
(all_reduce_small|all_reduce_large|add_answer|add_answer_of_ranks|add_prompt|add_prompt_of_ranks<[\w, ]+>)
(pack_kernel|random_kernel|copy_pieces_kernel|copy_inputs_kernel)'

# Machine code has a section .nv.info.NAME for each kernel.
kernels=$(find "$objects" -name '*.cu.o' | sort | while read -r object; do
  strings -a -n 8 "$object" | sed -n 's/^\.nv\.info\.\(_Z.*\)/\1/p' | sort -u | c++filt -p |
    sed "s#(anonymous namespace)::##g; s#_GLOBAL__N__[0-9a-zA-Z_]*::##g; s#quern::cuda::##g;
         s#^#$(basename "$object" .cu.o)  #"
done)
[ -n "$kernels" ] || { echo "count-instances: no kernels in $objects; is their machine code compressed?"; exit 1; }
products=$kernels
while read -r other; do
  rest=$(grep -vP "  (\w+::)*$other\$" <<<"$products") || true
  [ "$rest" != "$products" ] || { echo "count-instances: no kernel is called $other; mend the list"; exit 1; }
  products=$rest
done <<<"$others"

[ $list = no ] || echo "$products"
count=$(wc -l <<<"$products")
echo "count-instances: $count instances of products, at most $kMost; $(wc -l <<<"$kernels") kernels in all"
[ "$count" -le "$kMost" ]
