//! Loops in code that branches: Aho, Lam, Sethi, Ullman, "Compilers", 9.6.

use std::collections::BTreeMap;

/// Where control goes from an instruction, by the numbers of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// To the next one.
    Next,
    /// To this one.
    Jump(usize),
    /// To the next one or to this one.
    Either(usize),
    /// Nowhere in this code.
    End,
}

/// A loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// The instructions in it that are in no loop within it, in order.
    pub own: Vec<usize>,
    /// All instructions in it, in order.
    pub body: Vec<usize>,
    /// Whether there is no loop within it.
    pub innermost: bool,
}

/// The natural loops of code that starts with its first instruction, by where they start. Code that
/// is never reached has none, nor have branches to themselves: those fill up the end of kernels.
pub fn loops(code: &[Flow]) -> Vec<Loop> {
    let successors = |at: usize| {
        let next = (at + 1 < code.len()).then_some(at + 1);
        match code[at] {
            Flow::Next => [next, None],
            Flow::Jump(target) => [Some(target), None],
            Flow::Either(target) => [next, Some(target)],
            Flow::End => [None, None],
        }
        .into_iter()
        .flatten()
    };
    let order = reverse_postorder(code.len(), successors);
    let mut predecessors = vec![Vec::new(); code.len()];
    for &at in &order {
        successors(at).for_each(|to| predecessors[to].push(at));
    }
    let dominators = dominators(code.len(), &order, &predecessors);
    let mut bodies = BTreeMap::new();
    for &from in &order {
        for head in successors(from).filter(|&to| to != from && dominates(&dominators, to, from)) {
            let body = bodies.entry(head).or_insert_with(|| vec![false; code.len()]);
            collect(body, head, from, &predecessors);
        }
    }
    let bodies = bodies.into_iter().collect::<Vec<_>>();
    let lone = |index: usize| {
        let (head, body) = &bodies[index];
        let within = bodies.iter().filter(|(other, _)| other != head && body[*other]);
        let within = within.map(|(_, body)| body).collect::<Vec<_>>();
        let all = (0..code.len()).filter(|&at| body[at]);
        let own = all.clone().filter(|&at| !within.iter().any(|body| body[at]));
        Loop { own: own.collect(), body: all.collect(), innermost: within.is_empty() }
    };
    (0..bodies.len()).map(lone).collect()
}

/// All that is reached from instruction 0, each after what leads to it except by a loop.
fn reverse_postorder<I: Iterator<Item = usize>>(
    count: usize,
    successors: impl Fn(usize) -> I,
) -> Vec<usize> {
    let mut order = Vec::new();
    let mut seen = vec![false; count];
    let mut stack = Vec::new();
    if count > 0 {
        seen[0] = true;
        stack.push((0, successors(0)));
    }
    while let Some((at, rest)) = stack.last_mut() {
        match rest.next() {
            Some(to) if !seen[to] => {
                seen[to] = true;
                stack.push((to, successors(to)));
            }
            Some(_) => {}
            None => {
                order.push(*at);
                stack.pop();
            }
        }
    }
    order.reverse();
    order
}

/// The nearest instruction that every way to one goes through: Cooper, Harvey, Kennedy, "A Simple,
/// Fast Dominance Algorithm".
fn dominators(count: usize, order: &[usize], predecessors: &[Vec<usize>]) -> Vec<Option<usize>> {
    let mut place = vec![0; count];
    for (index, &at) in order.iter().enumerate() {
        place[at] = index;
    }
    let mut nearest = vec![None; count];
    if let Some(&first) = order.first() {
        nearest[first] = Some(first);
    }
    let mut changed = true;
    while changed {
        changed = false;
        for &at in order.iter().skip(1) {
            let known = predecessors[at].iter().copied().filter(|&from| nearest[from].is_some());
            let meet = known.reduce(|mut left, mut right| {
                while left != right {
                    let later = if place[left] > place[right] { &mut left } else { &mut right };
                    *later = nearest[*later].expect("what leads here is known");
                }
                left
            });
            changed |= nearest[at] != meet;
            nearest[at] = meet;
        }
    }
    nearest
}

fn dominates(nearest: &[Option<usize>], upper: usize, mut lower: usize) -> bool {
    loop {
        match nearest[lower] {
            _ if lower == upper => return true,
            Some(next) if next != lower => lower = next,
            _ => return false,
        }
    }
}

/// Adds what reaches `from` without passing `head`.
fn collect(body: &mut [bool], head: usize, from: usize, predecessors: &[Vec<usize>]) {
    body[head] = true;
    let mut stack = vec![from];
    while let Some(at) = stack.pop() {
        if !body[at] {
            body[at] = true;
            stack.extend(&predecessors[at]);
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{Flow::*, *};

    fn found(own: &[usize], innermost: bool) -> (Vec<usize>, bool) {
        (own.to_vec(), innermost)
    }

    #[rstest]
    #[case::straight(&[Next, Next, End], vec![])]
    #[case::nothing(&[], vec![])]
    #[case::one(&[Next, Next, Either(1), End], vec![found(&[1, 2], true)])]
    #[case::nested(
        &[Next, Next, Next, Either(2), Next, Either(1), End],
        vec![found(&[1, 4, 5], false), found(&[2, 3], true)]
    )]
    #[case::two_ways_back(&[Next, Next, Either(1), Either(1), End], vec![found(&[1, 2, 3], true)])]
    // A block moved to the end of the code jumps back without a loop.
    #[case::moved_block(&[Either(3), Next, End, Next, Jump(1)], vec![])]
    #[case::moved_block_of_a_loop(
        &[Next, Either(4), Either(1), End, Jump(2)],
        vec![found(&[1, 2, 4], true)]
    )]
    #[case::unreached(&[End, Next, Jump(1)], vec![])]
    #[case::padding(&[Next, Jump(1), Next], vec![])]
    fn loops_are_found(#[case] code: &[Flow], #[case] expected: Vec<(Vec<usize>, bool)>) {
        let loops = loops(code).into_iter().map(|found| (found.own, found.innermost));
        assert_eq!(loops.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn what_is_in_an_inner_loop_is_in_the_outer_one_too() {
        let code = [Next, Next, Next, Either(2), Next, Either(1), End];
        assert_eq!(loops(&code)[0].body, [1, 2, 3, 4, 5]);
    }
}
